"""What a plan says of itself, against what can be counted in the mask."""

import pytest
import torch

import magi_compile
from magi_bench.simulate import simulate
from magi_compile import AttnSlices
from magi_compile.dtensor import ContextParallelOptions, context_parallel, plan
from magi_compile.dtensor.planning.cost import DEFAULT_COST, CostModel
from magi_compile.dtensor.planning.rank_plan import plan_rank
from magi_compile.dtensor.sequence.explain import explain_plan
from tests.dtensor.test_packing_with_context_parallel import OPTIONS, mesh_of
from tests.dtensor.transformer import (
    block_mask,
    document_of,
    flex_attention,
    labels_of,
    make,
    tokens_of,
)

S = 256
DOCUMENTS = AttnSlices.from_cu_seqlens([0, 37, 64, 200, S], causal=True)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("degrees", [(0, 0), (1, 2), (2, 1)])
def test_rows_and_areas_are_those_of_the_mask(cp_size, degrees):
    options = ContextParallelOptions(
        chunk_size=16, degree=degrees[0], backward_degree=degrees[1], early=False
    )
    dense = DOCUMENTS.to_dense()
    for rank in range(cp_size):
        planned = plan_rank(DOCUMENTS, cp_size, rank, options)
        told = explain_plan(planned, DEFAULT_COST)
        owned = [planned.dispatch.positions(r) for r in range(cp_size)]
        assert told.area == tuple(int(dense[rows].sum()) for rows in owned)
        assert told.local_area == tuple(int(dense[rows][:, rows].sum()) for rows in owned)
        seen = [dense[rows].any(0) for rows in owned]
        received = [
            [int(seen[r][owned[s]].sum()) * (r != s) for s in range(cp_size)]
            for r in range(cp_size)
        ]
        assert told.received_rows == tuple(map(sum, received))
        assert told.sent_rows == tuple(map(sum, zip(*received, strict=True)))
        assert (told.rank, told.total, told.seqlen_local) == (rank, S, S // cp_size)
        for transfers, said in ((planned.forward, told.forward), (planned.backward, told.backward)):
            moved = sum(x.transfer.num_received for x in transfers if x.transfer)
            own = S // cp_size if transfers[0].transfer else 0
            assert told.received_rows[rank] <= moved <= told.received_rows[rank] + own
            assert ("stage" in said) == (len(transfers) > 1)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    "slices",
    [AttnSlices.causal(16384), AttnSlices.from_cu_seqlens([0, 3000, 9000, 16384], causal=True)],
)
def test_predictions_are_those_of_simulate(slices, early):
    cost = (
        CostModel.of_heads() if early else CostModel(*list(vars(CostModel.of_heads()).values())[:2])
    )
    told = explain_plan(plan_rank(slices, 8, 0, ContextParallelOptions(cost=cost)), cost)
    found = simulate(slices, 8, cost=cost, repeats=1)
    assert told.imbalance == pytest.approx(found.imbalance)
    assert max(told.received_rows) / told.seqlen_local == pytest.approx(found.recv_max)
    assert told.forward_efficiency == pytest.approx(found.eff_fwd)
    assert told.backward_efficiency == pytest.approx(found.eff_bwd)


def run_explain(group):
    p = plan(AttnSlices.causal(128), mesh_of(group), options=OPTIONS)
    text = str(p.explain())
    assert "tokens    128 over 2 ranks, 64 each, in chunks of 16" in text
    assert "balance   the heaviest rank has 1.000 times the mean" in text
    fast = p.explain(CostModel.of_heads(flops_per_second=1e15))
    assert fast.forward_seconds < p.explain().forward_seconds
    alone = plan(
        AttnSlices.causal(128),
        mesh_of(group),
        options=ContextParallelOptions(chunk_size=128, strategy="sequential"),
    )
    assert "one call" in str(alone.explain())


def test_a_plan_explains_itself(ranks_of):
    ranks_of(2).run(run_explain)


def run_explain_of_a_model(group):
    """Attention across ranks is not FlexAttention's any more; its plan tells what becomes of it."""
    document, tokens = document_of([50], S), tokens_of(1, S)
    positions, labels = torch.arange(S), labels_of(tokens, document)
    mask, model = block_mask("documents", document), make(flex_attention)
    with context_parallel(
        mesh_of(group),
        mask=mask,
        buffers=[tokens, positions, labels],
        buffer_seq_dims=[1, 0, 1],
        options=OPTIONS,
    ):
        torch._dynamo.reset()
        told = magi_compile.explain(model, tokens, positions, labels, mask)
    assert told.num_across_ranks == 2
    assert "2 attentions run across ranks: SequencePlan.explain() shows" in str(told)


def test_explain_of_a_model(ranks_of):
    ranks_of(2).run(run_explain_of_a_model)
