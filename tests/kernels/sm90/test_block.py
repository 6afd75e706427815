"""What the threads of a block do together (`csrc/sm90/common/block.cuh`), by threads of a CPU."""

import ctypes
import heapq

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from tests.kernels.support.cpp import compile_library

MAIN = """
#include "many_threads.cuh"
#include "common/block.cuh"

extern "C" int sums(const int* values, int count, int* sums, int threads) {
    int total = 0;
    launch(1, threads, [&] {
        const int found = ffa::prefix_sum(
            count, [&](int i) { return values[i]; }, [&](int i, int sum) { sums[i] = sum; });
        ffa::for_each(1, [&](int) { total = found; });
    });
    return total;
}

extern "C" int first(const bool* flags, int count, int threads) {
    int first = 0, scratch = 0;
    launch(1, threads, [&] {
        const int found = ffa::first_of(count, [&](int i) { return flags[i]; }, scratch);
        ffa::for_each(1, [&](int) { first = found; });
    });
    return first;
}

extern "C" int end(const bool* flags, int count, int threads) {
    int end = -1;
    launch(1, threads, [&] {
        const int found = ffa::end_of(count, [&](int i) { return flags[i]; });
        ffa::for_each(1, [&](int) { end = found; });
    });
    return end;
}

extern "C" void least(const int* values, int* least, int threads) {
    launch(1, threads, [&] { least[threadIdx.x] = ffa::least_of_warps(values[threadIdx.x / 32]); });
}

extern "C" void sort(int* keys, int count, int threads) {
    launch(1, threads, [&] { ffa::sort(keys, count, [](int a, int b) { return a < b; }); });
}

// How many threads of the grid are seen to have come, behind each of `rounds` waits, at least.
extern "C" int arrivals(int blocks, int threads, int rounds) {
    unsigned num_arrived = 0, come = 0;
    int least = 1 << 30;
    launch_together(blocks, threads, [&] {
        for (int round = 1; round <= rounds; ++round) {
            atomicAdd(&come, 1u);
            ffa::wait_for_grid(&num_arrived, round);
            const int seen = __atomic_load_n(&come, __ATOMIC_RELAXED);
            atomicMin(&least, seen - (round - 1) * blocks * threads);
        }
    });
    return least;
}

extern "C" void bits(const bool* flags, int count, unsigned* words, int blocks, int threads) {
    launch(blocks, threads, [&] {
        ffa::bits_of_grid(count, words, [&](long long i) { return flags[i]; });
    });
}

// The workers do the jobs in their order, in `threads` / 32 warps side by side;
// when the last one is free, by each warp.
extern "C" void do_jobs(const int* durations, const int* jobs, int count, int workers, int* last, int threads) {
    launch(1, threads, [&] {
        ffa::for_each_warp(threads / 32, [&](int warp) {
            ffa::Workers<2> record(workers);
            for (int i = 0; i < count; ++i) {
                for (int left = jobs[i]; left > 0;) {
                    left = record.work(record.first_free(), durations[i], left);
                }
            }
            last[warp] = record.last_free();
        });
    });
}

extern "C" void count_calls(int* calls, int count, int blocks, int threads) {
    launch(blocks, threads, [&] { ffa::for_each_of_grid(count, [&](int i) { ++calls[i]; }); });
}

extern "C" void count_calls_of_block(int* calls, int count, int threads) {
    launch(1, threads, [&] {
        ffa::for_each(count, [&](int i) { ++calls[i]; });
        ffa::compact_for_each(count, [&](int i) { ++calls[i]; });
    });
}
"""
COUNTS = [0, 1, 31, 32, 33, 500]


@pytest.fixture(scope="module")
def block(tmp_path_factory):
    return compile_library(tmp_path_factory, MAIN, "-O1 -pthread")


def address(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


@pytest.mark.parametrize("threads", [32, 96])
@pytest.mark.parametrize("count", COUNTS)
def test_prefix_sum(count, threads, block):
    values = torch.randint(0, 9, (count,), dtype=torch.int32)
    sums = torch.full((count + 1,), -1, dtype=torch.int32)
    total = block.sums(address(values), count, address(sums), threads)
    ends = values.cumsum(0, dtype=torch.int32)
    assert torch.equal(sums[:-1], ends - values)
    assert total == values.sum()
    assert sums[-1] == -1


@pytest.mark.parametrize("threads", [32, 96])
@pytest.mark.parametrize("count", COUNTS)
def test_first_of(count, threads, block):
    for first in {0, count // 2, count - 1, count}:
        flags = torch.rand(count) < 0.5
        flags[:first] = False
        flags[first : first + 1] = True
        assert block.first(address(flags), count, threads) == max(first, 0)


@pytest.mark.parametrize("threads", [32, 96])
@pytest.mark.parametrize("count", COUNTS)
def test_end_of(count, threads, block):
    for end in {0, min(count, 1), count // 2, count}:
        flags = torch.rand(count) < 0.5
        flags[end:] = False
        flags[max(end - 1, 0) : end] = True
        assert block.end(address(flags), count, threads) == end


@pytest.mark.parametrize("warps", [1, 3, 8])
def test_least_of_warps(warps, block):
    values = torch.randint(-99, 99, (warps,), dtype=torch.int32)
    least = torch.full((32 * warps,), 100, dtype=torch.int32)
    block.least(address(values), address(least), 32 * warps)
    assert set(least.tolist()) == {int(values.min())}


@pytest.mark.parametrize("threads", [32, 96])
@pytest.mark.parametrize("count", COUNTS)
def test_threads_of_a_block(count, threads, block):
    calls = torch.zeros(count + 1, dtype=torch.int32)
    block.count_calls_of_block(address(calls), count, threads)
    assert calls.tolist() == [2] * count + [0]


@pytest.mark.parametrize("threads", [32, 96])
@pytest.mark.parametrize("count", [1, 2, 64, 512])
def test_sort(count, threads, block):
    keys = torch.randint(0, 99, (count,), dtype=torch.int32)
    expected = keys.sort().values
    block.sort(address(keys), count, threads)
    assert torch.equal(keys, expected)


@pytest.mark.parametrize("workers", [1, 7, 32, 33, 64])
def test_workers(workers, block):
    durations = torch.tensor([9, 9, 40, 3, 5], dtype=torch.int32)
    jobs = torch.tensor([1, 20, 3, 40, 1], dtype=torch.int32)
    free = [0] * workers
    for duration in durations.repeat_interleave(jobs).tolist():
        heapq.heapreplace(free, free[0] + duration)
    last = torch.zeros(3, dtype=torch.int32)
    block.do_jobs(address(durations), address(jobs), len(jobs), workers, address(last), 96)
    assert last.tolist() == [max(free)] * 3


@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (3, 64)])
@pytest.mark.parametrize("count", COUNTS)
def test_bits_of_grid(count, blocks, threads, block):
    flags = torch.rand(count) < 0.5
    words = torch.full((-(-count // 32) + 1,), -1, dtype=torch.int32)
    block.bits(address(flags), count, address(words), blocks, threads)
    places = torch.arange(len(words) * 32 - 32)
    expected = torch.nn.functional.pad(flags, (0, len(places) - count))
    assert torch.equal((words[places // 32] >> (places % 32)) & 1 == 1, expected)
    assert words[-1] == -1


@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (3, 64)])
@pytest.mark.parametrize("count", COUNTS)
def test_for_each_of_grid(count, blocks, threads, block):
    calls = torch.zeros(count + 1, dtype=torch.int32)
    block.count_calls(address(calls), count, blocks, threads)
    assert torch.equal(calls[:-1], torch.ones(count, dtype=torch.int32))
    assert calls[-1] == 0


@pytest.mark.parametrize(("blocks", "threads"), [(1, 4), (3, 2), (8, 1)])
def test_thread_blocks_wait_for_one_another(block, blocks, threads):
    assert block.arrivals(blocks, threads, 20) == blocks * threads
