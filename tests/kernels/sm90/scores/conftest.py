import pytest

NUM_SMS = 3


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    from tests.kernels.support.on_a_cpu import compile_once

    return compile_once(tmp_path_factory)


@pytest.fixture
def kernel(compiled, monkeypatch):
    """The kernel for Hopper, whose launches run on this CPU."""
    from magi_compile.kernels.sm90.kernel import CudaKernel
    from tests.kernels.support.on_a_cpu import launching

    def launch(function, grid, block, params, stream, options):
        function(grid, block, params, NUM_SMS, 0, options.cluster)

    with launching(monkeypatch, compiled, NUM_SMS, launch):
        yield CudaKernel()
