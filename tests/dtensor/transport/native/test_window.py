"""The meetings of ranks, run by a model of streams in every order that chance finds: nobody reads what is not written
yet, nobody overwrites what is still read, and nobody waits forever."""

import random
from collections import deque

import pytest

driver = pytest.importorskip("cuda.bindings.driver")
window = pytest.importorskip("magi_compile.dtensor.transport.native.window")

STEPS = 9
WAIT = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32


class Model:
    """Ranks with two streams each. Their operations run one at a time; what cannot run yet returns False."""

    def __init__(self, size, num_slots, meets=True, meets_before=False):
        self.size, self.num_slots, self.meets = size, num_slots, meets
        self.meets_before = meets_before
        self.addresses = [1 << 20 << rank for rank in range(size)]
        self.flags = {
            address + index * window.FLAG_BYTES: 0
            for address in self.addresses
            for index in range((num_slots + 1) * size)
        }
        self.slots = [[None] * num_slots for _ in range(size)]
        self.readers = [[0] * num_slots for _ in range(size)]
        self.done = set()
        self.streams = []
        for rank in range(size):
            current, comm = deque(), deque()
            for step in range(STEPS):
                self.enqueue(rank, step, current, comm)
            self.streams += [current, comm]

    def enqueue(self, rank, step, current, comm):
        slot = step % self.num_slots
        # The last use ends before the next one begins: all that `Window.next_slot` waits for.
        current.append(lambda: not step or (rank, step - 1, "read") in self.done)
        if self.meets_before:
            current.append(lambda: self.record(rank, step, "begun"))
            comm.append(lambda: (rank, step, "begun") in self.done)
            meeting = window._meeting(self.addresses, rank, self.num_slots)
            comm.extend(lambda op=op: self.run_flag(op) for op in meeting)
            comm.append(lambda: self.record(rank, step, "met"))
            current.append(lambda: (rank, step, "met") in self.done)
        current.append(lambda: self.write(rank, slot, "half"))
        current.append(lambda: self.write(rank, slot, step))
        current.append(lambda: self.record(rank, step, "written"))
        comm.append(lambda: (rank, step, "written") in self.done)
        if self.meets:
            meeting = window._meeting(self.addresses, rank, slot)
            comm.extend(lambda op=op: self.run_flag(op) for op in meeting)
        for peer in range(self.size):
            comm.append(lambda peer=peer: self.begin_read(peer, slot, step))
            comm.append(lambda peer=peer: self.end_read(peer, slot, step))
        comm.append(lambda: self.record(rank, step, "read"))

    def run_flag(self, op):
        if op.waitValue.operation == WAIT:
            return self.flags[int(op.waitValue.address)] == int(op.waitValue.value)
        self.flags[int(op.writeValue.address)] = int(op.writeValue.value)
        return True

    def record(self, *event):
        self.done.add(event)
        return True

    def write(self, rank, slot, content):
        assert not self.readers[rank][slot], "overwritten while it is read"
        self.slots[rank][slot] = content
        return True

    def begin_read(self, peer, slot, step):
        assert self.slots[peer][slot] == step, f"not yet or no longer: {self.slots[peer][slot]}"
        self.readers[peer][slot] += 1
        return True

    def end_read(self, peer, slot, step):
        assert self.slots[peer][slot] == step
        self.readers[peer][slot] -= 1
        return True

    def run(self, seed):
        chance = random.Random(seed)
        # Some streams are much faster than others.
        speed = [chance.choice((1, 1, 20)) for _ in self.streams]
        while any(self.streams):
            waiting = [index for index, stream in enumerate(self.streams) if stream]
            while waiting:
                (index,) = chance.choices(waiting, [speed[i] for i in waiting])
                if self.streams[index][0]():
                    self.streams[index].popleft()
                    break
                waiting.remove(index)
            else:
                raise AssertionError("everybody waits")
        return self


def run_often(*arguments):
    for seed in range(40):
        assert not any(Model(*arguments).run(seed).flags.values())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_order_is_right(size):
    run_often(size, window.NUM_SLOTS)


def test_meetings_are_needed():
    with pytest.raises(AssertionError, match="not yet or no longer"):
        run_often(3, window.NUM_SLOTS, False)


def test_one_slot_is_too_few():
    with pytest.raises(AssertionError, match=r"overwritten while|no longer: [1-9]"):
        run_often(3, window.NUM_SLOTS - 1)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_meeting_before_makes_one_slot_enough(size):
    """What a replay is like that takes the slot of the replay before."""
    run_often(size, window.NUM_SLOTS - 1, True, True)
