// What `csrc/sm90/masks/lanes.cuh` offers, for one thread of a CPU.
#pragma once

namespace ffa {

template <class Value>
class PerLane {
public:
    Value& operator[](int lane) { return values_[lane]; }

private:
    Value values_[32];
};

template <class Body>
void for_each_lane(Body body) {
    for (int lane = 31; lane >= 0; --lane) {   // an order that nobody should rely on
        body(lane);
    }
}

template <class Flag>
unsigned ballot(Flag flag) {
    unsigned bits = 0;
    for_each_lane([&](int lane) { bits |= static_cast<unsigned>(flag(lane)) << lane; });
    return bits;
}

template <class Body>
void once(Body body) {
    body();
}

}   // namespace ffa
