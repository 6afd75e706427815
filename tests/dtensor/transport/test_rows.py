"""Moving rows: on the CPU, on a GPU, and its Triton code in Triton's interpreter."""

from pathlib import Path

import pytest
import torch

from magi_compile.dtensor.transport import rows
from tests.dtensor.support.moves import check_moves, check_sums
from tests.support.triton_interpreter import needs_triton, run_interpreted

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_move(device, dtype):
    check_moves(rows.move, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
def test_gather_and_split(device):
    x, y = torch.arange(12.0, device=device).view(6, 2), torch.arange(36.0, device=device)
    tensors, index = [x, y.view(6, 2, 3)], torch.tensor([4, 0, 4], dtype=torch.int32).to(device)
    packed = rows.gather(tensors, index)
    assert packed.shape == (3, 8)
    for part, tensor in zip(rows.split(packed, tensors), tensors, strict=True):
        assert torch.equal(part, tensor[[4, 0, 4]])
    assert rows.gather(tensors, index[:0]).shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_sums_in_the_order_of_ranks(device, dtype):
    check_sums(rows.Sums.write, dtype, device)


def test_rows_of():
    first, count = torch.tensor([[5, 0, 9], [2, 0, 3]], dtype=torch.int32)
    assert rows.rows_of(first, count, 5).tolist() == [5, 6, 9, 10, 11]


@needs_triton
def test_in_the_interpreter():
    """See `interpreted_rows.py`."""
    run_interpreted(Path(__file__).parents[1] / "support" / "interpreted_rows.py")


@needs_triton
def test_one_kernel_for_any_number_of_rows():
    """How many rows move, and where their list begins, changes in every step."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    from magi_compile.dtensor.transport.native.pull_triton import pull_kernel
    from magi_compile.dtensor.transport.rows_triton import move_kernel

    gpu = CUDABackend(GPUTarget("cuda", 90, 32))
    move, pull = (
        create_function_from_signature(kernel.signature, kernel.params, gpu)
        for kernel in (move_kernel, pull_kernel)
    )
    x, index = torch.zeros(64, 16).bfloat16(), torch.zeros(64, dtype=torch.int32)
    places, addresses = torch.zeros(3, 16, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    moves, pulls = [], []
    for begin, num in ((0, 16), (1, 17), (2, 1)):
        rows, widths = index[begin:], (16, 16)
        given = ((x, x), rows, (x, x), rows, num, widths, widths, widths)
        moves.append(move(*given, NUM_TENSORS=2, ROWS=4, BLOCK=16)[1])
        pulls.append(pull(x, places, num, addresses, 256, 16, BLOCK=16, ROWS=4)[1])
    assert moves[0] == moves[1] == moves[2]
    assert pulls[0] == pulls[1] == pulls[2]


@needs_triton
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("opens", [None, "*i8"], ids=["each alone", "groups"])
@pytest.mark.parametrize("prior", [None, "*fp32"], ids=["zeros", "prior"])
def test_sums_compile_for_hopper(prior, opens):
    """The interpreter lets a name have several types, and Triton's compiler does not."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from magi_compile.dtensor.transport.rows_triton import sum_kernel

    pair, numbers = ("*bf16", "*bf16"), ("i32", "i32")
    constants = {"NUM_TENSORS": 2, "SUM": tl.float32, "BLOCK": 1024}
    signature = {
        "outs": pair,
        "prior": (prior, prior),
        "buffers": pair,
        "arrived": pair,
        "begin": "*i32",
        "order": "*i32",
        "opens": opens,
        **dict.fromkeys(("widths", "out_strides", "buffer_strides", "arrived_strides"), numbers),
    }
    for name, given in (("prior", prior), ("opens", opens)):
        if given is None:
            constants[name] = None
    signature |= dict.fromkeys(constants, "constexpr")
    order = [name for name in sum_kernel.arg_names if name in signature]
    signature = {name: signature[name] for name in order}
    source = ASTSource(fn=sum_kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "ld.global" in compiled.asm["ptx"]
