"""Every mask_mod and score_mod of attention-gym (`attn-gym`), called as its documentation says.

    python -m tests.programs.attention_gym

lowers all of them, compares them with dense attention, and prints the tables of docs/published.md; `inductor` behind it
compiles them too, which takes ten times as long.
"""

from __future__ import annotations

import attn_gym.masks as masks
import attn_gym.mods as mods
import torch
import torch.nn.functional as F
from attn_gym.masks.causal import create_causal_block_mask_fast
from attn_gym.masks.document_mask import length_to_offsets
from attn_gym.masks.vsa import generate_vsa_padding_mask_mod
from torch.nn.attention.flex_attention import and_masks, noop_mask

from tests.programs.variants import BATCH, DIM, HEADS, Variant, print_tables

OFFSETS = length_to_offsets([100, 37, 1, 162], "cpu")  # 300 tokens


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def documents():
    make = masks.generate_doc_mask_mod
    return [
        Variant("generate_doc_mask_mod(causal_mask)", make(masks.causal_mask, OFFSETS)),
        Variant("generate_doc_mask_mod(noop_mask)", make(noop_mask, OFFSETS)),
        Variant(
            "generate_doc_mask_mod(sliding window)",
            make(masks.generate_sliding_window(20), OFFSETS),
        ),
        Variant(
            "generate_doc_mask_mod(prefix LM)", make(masks.generate_prefix_lm_mask(20), OFFSETS)
        ),
        Variant(
            "generate_packed_causal_doc_mask_mod",
            masks.generate_packed_causal_doc_mask_mod(OFFSETS),
        ),
        Variant(
            "generate_shared_prefix_mask_mod",
            masks.generate_shared_prefix_mask_mod(
                length_to_offsets([60, 40, 30, 20, 70, 50, 30], "cpu"),
                torch.tensor([0, 0, 0, 0, 4, 4, 4]),
            ),
        ),
    ]


def pixels():
    square = (256, 256)
    return [
        Variant("generate_natten", masks.generate_natten(16, 16, 5, 5), lengths=square),
        Variant(
            "generate_tiled_natten", masks.generate_tiled_natten(16, 16, 5, 5, 4, 4), lengths=square
        ),
        Variant(
            "generate_morton_natten", masks.generate_morton_natten(16, 16, 5, 5), lengths=square
        ),
        Variant(
            "generate_sta_mask_mod_2d",
            masks.generate_sta_mask_mod_2d((16, 16), (12, 12), (4, 4), 20),
            lengths=(276, 276),
        ),
        Variant(
            "generate_sta_mask_mod_3d",
            masks.generate_sta_mask_mod_3d((6, 8, 8), (6, 4, 4), (2, 4, 4), 16),
            lengths=(400, 400),
        ),
        Variant(
            "generate_spatial_head_mask_mod",
            masks.generate_spatial_head_mask_mod(20, 10, 30, 2, True, 16),
            lengths=(320, 320),
        ),
        Variant(
            "generate_temporal_head_mask_mod",
            masks.generate_temporal_head_mask_mod(20, 10, 30, 2),
            lengths=(320, 320),
        ),
    ]


def others():
    is_global = torch.zeros(300, dtype=torch.bool)
    is_global[[0, 8, 9, 130]] = True
    parents = [-1, *(int(x) for x in random(39).abs().mul(100).long() % torch.arange(1, 40))]
    ancestors = masks.build_tree_ancestor_matrix(parents, "cpu")
    return [
        Variant("causal_mask", masks.causal_mask),
        Variant(
            "create_causal_block_mask_fast",
            masks.causal_mask,
            block_mask=lambda: create_causal_block_mask_fast(None, None, 300, 300, "cpu"),
        ),
        Variant("generate_sliding_window", masks.generate_sliding_window(50)),
        Variant("generate_prefix_lm_mask", masks.generate_prefix_lm_mask(70)),
        Variant("generate_dilated_sliding_window", masks.generate_dilated_sliding_window(60, 4)),
        Variant(
            "generate_global_sliding_window", masks.generate_global_sliding_window(20, is_global)
        ),
        Variant(
            "generate_global_sliding_window, causal",
            and_masks(masks.generate_global_sliding_window(20, is_global), masks.causal_mask),
        ),
        Variant("batchify_mask_mod(causal_mask)", masks.batchify_mask_mod(masks.causal_mask, 75)),
        Variant(
            "generate_block_diffusion_mask",
            masks.generate_block_diffusion_mask(160, 32),
            lengths=(320, 320),
        ),
        Variant(
            "generate_vision_cross_attention_mask_mod",
            masks.generate_vision_cross_attention_mask_mod(
                torch.tensor([[0, 170], [30, 170], [170, 300]], dtype=torch.int32), 64
            ),
            lengths=(300, 192),
        ),
        Variant(
            "generate_jetspec_tree_causal_mask_mod",
            masks.generate_jetspec_tree_causal_mask_mod(100, ancestors),
            lengths=(40, 140),
        ),
        Variant(
            "generate_jetspec_training_mask_mod",
            masks.generate_jetspec_training_mask_mod(100, 16),
            lengths=(160, 260),
        ),
    ]


def video():
    """Video sparse attention: the tiles that every query tile sees are data, of each head."""
    layout = masks.create_vsa_tile_metadata((6, 6, 8), (4, 4, 4))
    sizes, length = layout.variable_block_sizes, layout.padded_seq_length
    tiles, numel = len(sizes), layout.tile_numel
    query, key = random(BATCH, HEADS, length, DIM), random(BATCH, HEADS, length, DIM, seed=1)
    top = masks.compute_vsa_topk_indices(query, key, numel, 3)
    shared = {"lengths": (length, length), "batch": BATCH, "heads": HEADS}
    wide = masks.compute_vsa_topk_indices(query, key, 256, 1)
    every, padded = (masks.generate_vsa_mask_mod(top, numel, x) for x in (None, sizes))
    return [
        Variant("generate_vsa_mask_mod", every, **shared),
        Variant("generate_vsa_mask_mod, padded tiles", padded, **shared),
        Variant(
            "generate_vsa_padding_mask_mod",
            generate_vsa_padding_mask_mod(sizes, numel),
            lengths=(length, length),
        ),
        Variant(
            "create_vsa_block_mask",
            every,
            block_mask=lambda: masks.create_vsa_block_mask(top, numel, tiles),
            **shared,
        ),
        Variant(
            "create_vsa_block_mask, padded tiles",
            padded,
            block_mask=lambda: masks.create_vsa_block_mask(top, numel, tiles, sizes),
            **shared,
        ),
        Variant(
            "create_vsa_flash_block_mask",
            masks.generate_vsa_mask_mod(wide, 256),
            block_mask=lambda: masks.create_vsa_flash_block_mask(wide, 256, length // 256),
            **shared,
        ),
    ]


def scores():
    nodes, causal = 60, masks.causal_mask
    adjacency = random(BATCH, nodes, nodes) > 1.5
    distances = mods.shortest_path_distances(adjacency, 4)
    edge_types = (random(BATCH, nodes, nodes, seed=1) * 100).long() % 5
    paths, path_lengths = mods.shortest_path_edge_types(adjacency, edge_types, 3)
    spatial, edges = (random(*shape).requires_grad_() for shape in ((HEADS, 6), (HEADS, 3, 5)))
    query_rope, key_rope = random(BATCH, HEADS, 300, 8), random(BATCH, 1, 300, 8, seed=1)
    graph = {"lengths": (nodes, nodes)}
    activation = mods.generate_activation_score_mod
    return [
        Variant("generate_alibi_bias", causal, mods.generate_alibi_bias(HEADS)),
        Variant("generate_sandwich_bias", causal, mods.generate_sandwich_bias(HEADS, 300)),
        Variant("generate_tanh_softcap", causal, mods.generate_tanh_softcap(2)),
        Variant("generate_tanh_softcap(approx=True)", causal, mods.generate_tanh_softcap(2, True)),
        Variant("generate_activation_score_mod(gelu)", None, activation(F.gelu)),
        Variant("generate_activation_score_mod(relu)", None, activation(F.relu)),
        Variant("generate_activation_score_mod(sigmoid)", causal, activation(torch.sigmoid)),
        Variant(
            "generate_graphormer_spatial_bias",
            None,
            mods.generate_graphormer_spatial_bias(spatial, distances),
            leaves=(spatial,),
            **graph,
        ),
        Variant(
            "generate_graphormer_edge_bias",
            None,
            mods.generate_graphormer_edge_bias(edges, paths, path_lengths),
            leaves=(edges,),
            **graph,
        ),
        Variant(
            "generate_mla_rope_score_mod",
            causal,
            mods.generate_mla_rope_score_mod(query_rope, key_rope, HEADS),
        ),
    ]


MASKS = [*others(), *documents(), *pixels(), *video()]
SCORES = scores()

if __name__ == "__main__":
    print_tables({"mask": MASKS, "score_mod": SCORES})
