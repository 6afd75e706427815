"""The cost of compute and communication on a machine: the only rates that planning knows."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from magi_compile.masks.arguments import check_count, check_flag
from magi_compile.ops.validation import check_number

MOST = 1e9  # of any rate, so that what is predicted is finite

#: Packing and unpacking tensors that ranks which share heads exchange, over moving them whole inside of a host.
PACKING = 1.0


@dataclass(frozen=True)
class CostModel:
    """Seconds of one attention layer on one rank.

    Attributes:
        seconds_per_area: forward, for one visible (row, key) pair with all heads.
        seconds_per_row: receiving one remote row of K and V with all heads.
        stage_seconds_per_row: what one more stage costs forward for each query row of the rank: its partial output is
            written in fp32 and read again, Q is read once more, and a kernel has a ramp and a tail.
        backward_stage_seconds_per_row: the same backward, where what comes before and after the gradients of the keys
            is done once more, and dq comes in partial sums that are added up.
        latency_seconds: one collective without data.
        backward_area_factor: backward compute over forward compute.
        backward_reduce_factor: sending back dK and dV of a row over receiving K and V of it.
        backward_wave_rows: key rows that the whole GPU works on at a time backward, where dK and dV of a block of
            rows are one thread block's work; few times as many cannot be dealt evenly. 0 where that is no matter.
        other_host_factor: receiving a row from another host over receiving one of the same host, for several hosts.
        starts_early: whether the forward kernel is an `EarlyKernel`, which hides a cast without another stage.
        heads: query and key-value heads of these rates, as many as a call has on a rank. None where nobody said: no
            ranks share heads unasked then.
    """

    seconds_per_area: float
    seconds_per_row: float
    stage_seconds_per_row: float = 30e-9
    backward_stage_seconds_per_row: float = 30e-9
    latency_seconds: float = 20e-6
    backward_area_factor: float = 2.5
    backward_reduce_factor: float = 1.0
    backward_wave_rows: float = 0.0
    other_host_factor: float = 7.0
    starts_early: bool = False
    heads: tuple[int, int] | None = None

    def exchange_seconds(self, rows: float, ranks: int) -> float:
        """What a pass takes, with the tokens of a rank in `rows`, for so many ranks of a host that share heads to
        exchange q, k and v, and out on the way back, or the gradients of these; 0 where `heads` is None."""
        if ranks == 1 or self.heads is None:
            return 0.0
        nheads_q, nheads_kv = self.heads
        # As rows of keys and values. Heads of these are repeated where there are fewer than ranks.
        moved = rows * (nheads_q + max(nheads_kv, ranks)) / nheads_kv
        share = (ranks - 1) / ranks + PACKING
        return 4 * self.latency_seconds + moved * share * self.seconds_per_row

    def of_share(self, ranks: int) -> CostModel:
        """The rates where so many ranks share the heads, and each has rows of its share."""
        if ranks == 1:
            return self
        return replace(
            self,
            seconds_per_area=self.seconds_per_area / ranks,
            seconds_per_row=self.seconds_per_row / ranks,
            stage_seconds_per_row=self.stage_seconds_per_row / ranks,
            backward_stage_seconds_per_row=self.backward_stage_seconds_per_row / ranks,
            backward_wave_rows=self.backward_wave_rows * ranks,
        )

    def __post_init__(self) -> None:
        check_flag("starts_early", self.starts_early)
        if self.heads is not None:
            if not isinstance(self.heads, tuple) or len(self.heads) != 2:
                raise TypeError(
                    f"`heads` must be a pair (nheads_q, nheads_kv) or None, got {self.heads!r}"
                )
            for number in self.heads:
                check_count("heads", number, 1)
            if self.heads[0] % self.heads[1]:
                raise ValueError(
                    "`heads` must be (nheads_q, nheads_kv), of which the second divides the first, got "
                    f"{self.heads}"
                )
        for rate in fields(self):
            if rate.name in ("starts_early", "heads"):
                continue
            given = getattr(self, rate.name)
            check_number(rate.name, given)
            if given > MOST:
                raise ValueError(f"`{rate.name}` must be at most {MOST:g}, got {given}")

    @staticmethod
    def of_heads(
        nheads_q: int = 64,
        nheads_kv: int = 8,
        head_dim: int = 128,
        *,
        bytes_per_value: int = 2,
        flops_per_second: float = 600e12,
        bytes_per_second: float = 350e9,
        bytes_per_second_between_hosts: float = 50e9,
    ) -> CostModel:
        """The model of given heads at given rates; the defaults are round figures for H200s on NVLink, each with a link
        of 400 Gbit/s to other hosts.

        Those of stages are measured: forward 22 to 31 ns a row of 64 heads of 128, whatever the mask, backward 50.

        Args:
            nheads_q: query heads of a rank.
            nheads_kv: heads of keys and values.
            head_dim: of q, k and v.
            bytes_per_value: of k and v.
            flops_per_second: of the attention kernel, FLOP/s.
            bytes_per_second: a rank receives between GPUs of a host, bytes/s.
            bytes_per_second_between_hosts: the same from other hosts.

        Returns:
            The model, in seconds.

        Raises:
            TypeError: an argument is no number.
            ValueError: a number of heads, a size or a rate is out of range.
        """
        check_heads(nheads_q, nheads_kv, head_dim=head_dim, bytes_per_value=bytes_per_value)
        rates = {
            "flops_per_second": flops_per_second,
            "bytes_per_second": bytes_per_second,
            "bytes_per_second_between_hosts": bytes_per_second_between_hosts,
        }
        for name, rate in rates.items():
            check_number(name, rate)
            if rate == 0:
                raise ValueError(f"`{name}` must be more than 0, got {rate}")
        stage = 1e-9 * nheads_q * head_dim / (64 * 128)
        return CostModel(
            seconds_per_area=4 * nheads_q * head_dim / flops_per_second,
            seconds_per_row=2 * nheads_kv * head_dim * bytes_per_value / bytes_per_second,
            stage_seconds_per_row=30 * stage,
            backward_stage_seconds_per_row=50 * stage,
            backward_wave_rows=wave_rows(nheads_kv, head_dim, num_sms=132),
            other_host_factor=bytes_per_second / bytes_per_second_between_hosts,
            starts_early=True,
            heads=(nheads_q, nheads_kv),
        )


def check_heads(nheads_q: int, nheads_kv: int, **others: int) -> None:
    """Raises where one is no number from 1 on, or `nheads_kv` does not divide `nheads_q`."""
    for name, given in {"nheads_q": nheads_q, "nheads_kv": nheads_kv, **others}.items():
        check_count(name, given, 1)
    if nheads_q % nheads_kv:
        raise ValueError(
            f"`nheads_q` must be a multiple of `nheads_kv`, {nheads_kv}, got {nheads_q}"
        )


def wave_rows(nheads_kv: int, head_dim: int, num_sms: int) -> float:
    """`backward_wave_rows` of a GPU whose thread blocks take 128 keys of one kv head each,
    or 64 where heads are wide."""
    return (128 if head_dim <= 128 else 64) * num_sms / nheads_kv


# Of no model's heads.
DEFAULT_COST = replace(CostModel.of_heads(), heads=None)
