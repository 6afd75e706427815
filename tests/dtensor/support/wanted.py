"""Random routes, and what they must bring: shared by the tests of this directory."""

import torch

from magi_compile.dtensor.transport.collectives import Route


def random_ranges(size, num_rows, longest, seed):
    """`[receiver][sender]`: the ranges `(first, count)` of home rows that go there; some pairs have none."""
    generator = torch.Generator().manual_seed(seed)

    def integer(end):
        return int(torch.randint(0, end, (), generator=generator))

    def ranges():
        found, row = [], integer(longest)
        while row < num_rows and integer(8):
            count = min(1 + integer(longest), num_rows - row)
            found.append((row, count))
            row += count + integer(3)
        return found

    return [[ranges() if integer(5) else [] for _ in range(size)] for _ in range(size)]


def routes_of(wanted, seed, device="cpu"):
    """The route of each rank. In a buffer, ranges lie in an order of their own."""
    size = len(wanted)
    generator = torch.Generator().manual_seed(seed)
    sends, recvs = [[] for _ in range(size)], [[] for _ in range(size)]
    for receiver in range(size):
        ranges = [(sender, *span) for sender in range(size) for span in wanted[receiver][sender]]
        begin = [0] * len(ranges)
        row = 0
        for index in torch.randperm(len(ranges), generator=generator).tolist():
            begin[index], row = row, row + ranges[index][2]
        for (sender, first, count), buffer_row in zip(ranges, begin, strict=True):
            sends[sender].append((receiver, first, buffer_row, count))
            recvs[receiver].append((sender, buffer_row, first, count))

    def counts(ranges):
        totals = [0] * size
        for peer, _, _, count in ranges:
            totals[peer] += count
        return totals

    peak = max(sum(counts(ranges)) for ranges in recvs)
    routes = []
    for rank in range(size):
        ranges = torch.tensor(sends[rank] + recvs[rank], dtype=torch.int32).view(-1, 4)
        numbers = (len(sends[rank]), counts(sends[rank]), counts(recvs[rank]), peak)
        routes.append(Route.of(ranges, ranges.to(device), *numbers))
    return routes


def home_rows(rank, num_rows, shape, dtype, step=0):
    """What a rank holds; every rank can make that of all."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(num_rows, *shape, generator=generator).to(dtype)


def expected_buffer(route, tensors):
    """What a cast brings, where `tensors` are the home rows of all ranks."""
    buffer = tensors[0].new_empty(route.num_received, *tensors[0].shape[1:])
    for peer, row, peer_row, count in route.host_recvs.tolist():
        buffer[row : row + count] = tensors[peer][peer_row : peer_row + count]
    return buffer


def expected_total(route, rank, buffers, total):
    """What a reduce makes of `total`, where `buffers` are those of all ranks: fp32 sums, `rank` first,
    then in order."""
    total = total.clone()
    ranges = route.host_sends.tolist()
    for peer, row, peer_row, count in sorted(ranges, key=lambda span: span[0] != rank):
        total[row : row + count] += buffers[peer][peer_row : peer_row + count].float()
    return total
