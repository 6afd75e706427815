import pytest

NUM_SMS = 3


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    from tests.kernels.support.on_a_cpu import compile_once

    return compile_once(tmp_path_factory)


@pytest.fixture
def kernel(request, compiled, monkeypatch):
    """The kernel for Hopper, whose launches run on this CPU;
    a parameter other than 0 gives its threads and copies a random order."""
    from magi_compile.kernels.sm90.kernel import HopperKernel
    from tests.kernels.support.on_a_cpu import launching

    def launch(function, grid, block, params, stream, options):
        timing = getattr(request, "param", 0)
        function(grid, block, params, NUM_SMS, timing, options.cluster)

    with launching(monkeypatch, compiled, NUM_SMS, launch):
        yield HopperKernel()
