"""What compute and communication cost on a machine: the only rates that planning knows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CostModel:
    """Seconds of one attention layer on one rank.

    Attributes:
        seconds_per_area: forward, for one visible (row, key) pair with all heads.
        seconds_per_row: receiving one remote row of K and V with all heads.
        stage_seconds: what one more stage costs forward: a kernel's ramp and tail, and merging its result.
        backward_stage_seconds: the same backward.
        latency_seconds: one collective without data.
        backward_area_factor: backward compute over forward compute.
        backward_reduce_factor: sending back dK and dV of a row over receiving K and V of it.
        backward_wave_rows: key rows that the whole GPU works on at a time backward, where dK and dV of a block of
            rows are one thread block's work; few times as many cannot be dealt evenly. 0 where that is no matter.
    """

    seconds_per_area: float
    seconds_per_row: float
    stage_seconds: float = 100e-6
    backward_stage_seconds: float = 300e-6
    latency_seconds: float = 20e-6
    backward_area_factor: float = 2.5
    backward_reduce_factor: float = 1.0
    backward_wave_rows: float = 0.0

    @staticmethod
    def of_heads(
        nheads_q: int = 64,
        nheads_kv: int = 8,
        head_dim: int = 128,
        *,
        bytes_per_value: int = 2,
        flops_per_second: float = 600e12,
        bytes_per_second: float = 350e9,
    ) -> CostModel:
        """The model of given heads at given rates; the defaults are round figures for H200s on NVLink."""
        return CostModel(
            seconds_per_area=4 * nheads_q * head_dim / flops_per_second,
            seconds_per_row=2 * nheads_kv * head_dim * bytes_per_value / bytes_per_second,
            backward_wave_rows=wave_rows(nheads_kv, num_sms=132),
        )


def wave_rows(nheads_kv: int, num_sms: int) -> float:
    """`backward_wave_rows` of a GPU whose thread blocks take 128 keys of one kv head each."""
    return 128 * num_sms / nheads_kv


DEFAULT_COST = CostModel.of_heads()
