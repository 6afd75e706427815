"""The terms in which the backward kernels add statistics of queries: their source, compiled for the CPU."""

import ctypes

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from tests.kernels.support.cpp import ON_A_CPU, compile_library

SOURCE = """
#include "common/ptx.cuh"
#include "common/statistics.cuh"

extern "C" void split(const float* values, int count, unsigned short (*terms)[3]) {
    for (int i = 0; i < count; ++i) {
        for (int term = 0; term < 3; ++term) {
            terms[i][term] = ffa::term_of(values[i], term);
        }
    }
}
"""


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """`split(values)`: the terms of each, bf16 `[len(values), 3]`."""
    options = "-O1 -fno-strict-aliasing"
    library = compile_library(tmp_path_factory, SOURCE, options, ON_A_CPU)

    def terms_of(values: torch.Tensor) -> torch.Tensor:
        terms = torch.empty(len(values), 3, dtype=torch.bfloat16)
        library.split(
            ctypes.c_void_p(values.data_ptr()), len(values), ctypes.c_void_p(terms.data_ptr())
        )
        return terms

    return terms_of


def test_the_sum_of_the_terms_is_the_number(split):
    torch.manual_seed(0)
    values = torch.randn(10000) * 10.0 ** torch.randint(-20, 38, (10000,))
    values = torch.cat([values, torch.tensor([0.0, 1.0, -3.38e38, 3.38e38])])
    terms = split(values)
    assert terms.isfinite().all()
    error = (terms.double().sum(1) - values.double()).abs()
    assert (error <= 2.0**-24 * values.double().abs()).all()


def test_what_is_not_finite_is_so_in_the_sum_alone(split):
    terms = split(torch.tensor([torch.inf, -torch.inf, torch.nan]))
    assert terms.isfinite().all()
    assert not terms.float().sum(1).isfinite().any()
