"""What six representative calls become, as text: a change of the lowering shows here first."""

import re

import torch
from expecttest import assert_expected_inline
from torch.nn.attention.flex_attention import (
    AuxRequest,
    and_masks,
    create_block_mask,
    flex_attention,
)

from magi_compile.lowering.flex import lower_flex_attention

LENGTH = 256
x = torch.randn(1, 2, LENGTH, 16)
document = torch.arange(LENGTH) // 100


def lowered(function, *arguments, dynamic=False):
    """The nodes of the lowered graph that are not the model's own, from the mask on, and the mask programs."""
    found = []

    def backend(gm, _):
        before = set(gm.graph.nodes)
        lower_flex_attention(gm)
        made = [node for node in gm.graph.nodes if node not in before]
        found.extend(f"{node.name} = {_target(node)}({_shown(node)})" for node in made)
        return gm.forward

    torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*arguments)
    return "\n".join(found)


def _target(node):
    return re.sub(r"^<.* (\w+)>$", r"\1", getattr(node.target, "__name__", str(node.target)))


def _shown(node):
    text = ", ".join(str(argument).rstrip() for argument in node.args)
    return "\n    ".join(line for line in text.splitlines() if line)


def causal(b, h, q, kv):
    return q >= kv


def made_here(mask_mod):
    return create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu")


def test_without_a_mask():
    assert_expected_inline(
        lowered(lambda x: flex_attention(x, x, x), x),
        """\
mask_slices_default = mask_slices.default([], [], True;; def mask(b):;;     x2 = b.new_ones(size = (), dtype = torch.bool, device = device(type='cpu'));;     return x2, 1, 256, 256, 272, cpu, [], [], False)
getitem_4 = getitem(mask_slices_default, 0)
getitem_5 = getitem(mask_slices_default, 1)
getitem_6 = getitem(mask_slices_default, 2)
transpose_1 = transpose(l_x_, 1, 2)
reshape = reshape(transpose_1, (-1, 2, 16))
transpose_2 = transpose(l_x_, 1, 2)
reshape_1 = reshape(transpose_2, (-1, 2, 16))
transpose_3 = transpose(l_x_, 1, 2)
reshape_2 = reshape(transpose_3, (-1, 2, 16))
attention_default = attention.default(reshape, reshape_1, reshape_2, [getitem_4, getitem_5, getitem_6], [], 0.25, 0.0, cpu)
getitem_7 = getitem(attention_default, 0)
getitem_8 = getitem(attention_default, 1)
transpose_4 = transpose(getitem_7, 0, 1)
reshape_3 = reshape(transpose_4, (1, 2, 256, 16))
reshape_4 = reshape(getitem_8, (2, 1, 256))
transpose_5 = transpose(reshape_4, 0, 1)
mul = mul(transpose_5, 1.4426950408889634)""",
    )


def test_causal_with_a_soft_cap():
    def attend(x):
        def capped(score, b, h, q, kv):
            return 5 * torch.tanh(score / 5)

        return flex_attention(x, x, x, capped, made_here(causal))

    assert_expected_inline(
        lowered(attend, x),
        """\
mask_slices_default = mask_slices.default([], [], q >= kv;; def mask(q, kv):;;     x3 = q >= kv;;     return x3, 1, 256, 256, 272, cpu, [], [], False)
getitem_5 = getitem(mask_slices_default, 0)
getitem_6 = getitem(mask_slices_default, 1)
getitem_7 = getitem(mask_slices_default, 2)
transpose_2 = transpose(l_x_, 1, 2)
reshape = reshape(transpose_2, (-1, 2, 16))
transpose_3 = transpose(l_x_, 1, 2)
reshape_1 = reshape(transpose_3, (-1, 2, 16))
transpose_4 = transpose(l_x_, 1, 2)
reshape_2 = reshape(transpose_4, (-1, 2, 16))
attention_default = attention.default(reshape, reshape_1, reshape_2, [getitem_5, getitem_6, getitem_7], [], 0.25, 5.0, cpu)
getitem_8 = getitem(attention_default, 0)
getitem_9 = getitem(attention_default, 1)
transpose_5 = transpose(getitem_8, 0, 1)
reshape_3 = reshape(transpose_5, (1, 2, 256, 16))
reshape_4 = reshape(getitem_9, (2, 1, 256))
transpose_6 = transpose(reshape_4, 0, 1)
mul = mul(transpose_6, 1.4426950408889634)""",
    )


def test_documents_in_two_layers():
    def attend(x, document):
        def same(b, h, q, kv):
            return document[q] == document[kv]

        mask = made_here(and_masks(same, causal))
        x = flex_attention(x, x, x, block_mask=mask)
        return flex_attention(x, x, x, block_mask=mask)

    assert_expected_inline(
        lowered(attend, x, document),
        """\
mask_bits_default = mask_bits.default([l_document_], [], (t0[q] == t0[kv]) & (q >= kv)  # t0: document;; def mask(b, q, kv, t0):;;     x5 = b.new_ones((), dtype = torch.bool);;     x6 = t0[q];;     x7 = t0[kv];;     x8 = x6 == x7;;     x9 = x5 & x8;;     x10 = q >= kv;;     x11 = x9 & x10;;     return x11, 1, 256, 256, 272, cpu, [], [], False, [1, 1])
getitem_8 = getitem(mask_bits_default, 0)
getitem_9 = getitem(mask_bits_default, 1)
getitem_10 = getitem(mask_bits_default, 2)
getitem_11 = getitem(mask_bits_default, 3)
transpose_2 = transpose(l_x_, 1, 2)
reshape = reshape(transpose_2, (-1, 2, 16))
transpose_3 = transpose(l_x_, 1, 2)
reshape_1 = reshape(transpose_3, (-1, 2, 16))
transpose_4 = transpose(l_x_, 1, 2)
reshape_2 = reshape(transpose_4, (-1, 2, 16))
attention_default = attention.default(reshape, reshape_1, reshape_2, [getitem_8, getitem_9, getitem_10], [], 0.25, 0.0, cpu, getitem_11)
getitem_12 = getitem(attention_default, 0)
getitem_13 = getitem(attention_default, 1)
transpose_5 = transpose(getitem_12, 0, 1)
reshape_3 = reshape(transpose_5, (1, 2, 256, 16))
reshape_4 = reshape(getitem_13, (2, 1, 256))
transpose_6 = transpose(reshape_4, 0, 1)
mul = mul(transpose_6, 1.4426950408889634)
transpose_7 = transpose(reshape_3, 1, 2)
reshape_5 = reshape(transpose_7, (-1, 2, 16))
transpose_8 = transpose(reshape_3, 1, 2)
reshape_6 = reshape(transpose_8, (-1, 2, 16))
transpose_9 = transpose(reshape_3, 1, 2)
reshape_7 = reshape(transpose_9, (-1, 2, 16))
attention_default_1 = attention.default(reshape_5, reshape_6, reshape_7, [getitem_8, getitem_9, getitem_10], [], 0.25, 0.0, cpu, getitem_11)
getitem_14 = getitem(attention_default_1, 0)
getitem_15 = getitem(attention_default_1, 1)
transpose_10 = transpose(getitem_14, 0, 1)
reshape_8 = reshape(transpose_10, (1, 2, 256, 16))
reshape_9 = reshape(getitem_15, (2, 1, 256))
transpose_11 = transpose(reshape_9, 0, 1)
mul_1 = mul(transpose_11, 1.4426950408889634)""",
    )


def test_a_view_inside_the_mask_mod():
    def attend(x, document):
        def same(b, h, q, kv):
            return document.squeeze(0)[q] == document.squeeze(0)[kv]

        return flex_attention(x, x, x, block_mask=made_here(same))

    assert_expected_inline(
        lowered(attend, x, document[None]),
        """\
mask_bits_default = mask_bits.default([l_document_], [], t1[q] == t1[kv]  # t0: document, t1: document.squeeze(0);; def t1(t0):;;     x2 = t0.squeeze(0);;     return x2;; ;; def mask(q, kv, t0):;;     x4 = t0.squeeze(0);;     x5 = x4[q];;     x6 = t0.squeeze(0);;     x7 = x6[kv];;     x8 = x5 == x7;;     return x8, 1, 256, 256, 272, cpu, [], [], False, [1, 1])
getitem_5 = getitem(mask_bits_default, 0)
getitem_6 = getitem(mask_bits_default, 1)
getitem_7 = getitem(mask_bits_default, 2)
getitem_8 = getitem(mask_bits_default, 3)
transpose_2 = transpose(l_x_, 1, 2)
reshape = reshape(transpose_2, (-1, 2, 16))
transpose_3 = transpose(l_x_, 1, 2)
reshape_1 = reshape(transpose_3, (-1, 2, 16))
transpose_4 = transpose(l_x_, 1, 2)
reshape_2 = reshape(transpose_4, (-1, 2, 16))
attention_default = attention.default(reshape, reshape_1, reshape_2, [getitem_5, getitem_6, getitem_7], [], 0.25, 0.0, cpu, getitem_8)
getitem_9 = getitem(attention_default, 0)
getitem_10 = getitem(attention_default, 1)
transpose_5 = transpose(getitem_9, 0, 1)
reshape_3 = reshape(transpose_5, (1, 2, 256, 16))
reshape_4 = reshape(getitem_10, (2, 1, 256))
transpose_6 = transpose(reshape_4, 0, 1)
mul = mul(transpose_6, 1.4426950408889634)""",
    )


def test_a_block_mask_from_outside_with_lse():
    mask = made_here(causal)

    def attend(x, mask):
        return flex_attention(x, x, x, block_mask=mask, return_aux=AuxRequest(lse=True))

    assert_expected_inline(
        lowered(attend, x, mask),
        """\
mask_slices_default = mask_slices.default([], [], q >= kv;; def mask(q, kv):;;     x3 = q >= kv;;     return x3, 1, 256, 256, 272, cpu, [l_mask_kv_num_blocks, l_mask_kv_indices, l_mask_full_kv_num_blocks, l_mask_full_kv_indices], [128, 128], False)
getitem_3 = getitem(mask_slices_default, 0)
getitem_4 = getitem(mask_slices_default, 1)
getitem_5 = getitem(mask_slices_default, 2)
transpose = transpose(l_x_, 1, 2)
reshape = reshape(transpose, (-1, 2, 16))
transpose_1 = transpose(l_x_, 1, 2)
reshape_1 = reshape(transpose_1, (-1, 2, 16))
transpose_2 = transpose(l_x_, 1, 2)
reshape_2 = reshape(transpose_2, (-1, 2, 16))
attention_default = attention.default(reshape, reshape_1, reshape_2, [getitem_3, getitem_4, getitem_5], [], 0.25, 0.0, cpu)
getitem_6 = getitem(attention_default, 0)
getitem_7 = getitem(attention_default, 1)
transpose_3 = transpose(getitem_6, 0, 1)
reshape_3 = reshape(transpose_3, (1, 2, 256, 16))
reshape_4 = reshape(getitem_7, (2, 1, 256))
transpose_4 = transpose(reshape_4, 0, 1)
clone = clone(transpose_4)
mul_1 = mul(clone, 1.4426950408889634)""",
    )


def test_dynamic_lengths():
    def attend(x):
        mask = create_block_mask(causal, None, None, x.shape[2], x.shape[2], device="cpu")
        return flex_attention(x, x, x, block_mask=mask)

    assert_expected_inline(
        lowered(attend, x, dynamic=True),
        """\
sym_size_int = sym_size.int(l_x_, 2)
sym_size_int_1 = sym_size.int(l_x_, 2)
floordiv_4 = floordiv(sym_size_int, 16)
add_4 = add(floordiv_4, 256)
mul_2 = mul(add_4, 1)
mul_3 = mul(mul_2, 1)
mask_slices_default = mask_slices.default([], [], q >= kv;; def mask(q, kv):;;     x3 = q >= kv;;     return x3, 1, sym_size_int, sym_size_int_1, mul_3, cpu, [], [], False)
getitem_63 = getitem(mask_slices_default, 0)
getitem_64 = getitem(mask_slices_default, 1)
getitem_65 = getitem(mask_slices_default, 2)
sym_size_int_2 = sym_size.int(l_x_, 2)
transpose_2 = transpose(l_x_, 1, 2)
reshape = reshape(transpose_2, (-1, 2, 16))
transpose_3 = transpose(l_x_, 1, 2)
reshape_1 = reshape(transpose_3, (-1, 2, 16))
transpose_4 = transpose(l_x_, 1, 2)
reshape_2 = reshape(transpose_4, (-1, 2, 16))
attention_default = attention.default(reshape, reshape_1, reshape_2, [getitem_63, getitem_64, getitem_65], [], 0.25, 0.0, cpu)
getitem_66 = getitem(attention_default, 0)
getitem_67 = getitem(attention_default, 1)
transpose_5 = transpose(getitem_66, 0, 1)
reshape_3 = reshape(transpose_5, (1, 2, sym_size_int_2, 16))
reshape_4 = reshape(getitem_67, (2, 1, sym_size_int_2))
transpose_6 = transpose(reshape_4, 0, 1)
mul_4 = mul(transpose_6, 1.4426950408889634)""",
    )
