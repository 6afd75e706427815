from tests.dtensor.conftest import pools, ranks_of  # noqa: F401
