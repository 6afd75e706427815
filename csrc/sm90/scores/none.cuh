// In place of a score program where there is none.
#pragma once

namespace ffa {

struct NoScore {
    static constexpr bool kIsThere = false;
    static constexpr bool kIsShift = false;
    static constexpr int kNumWords = 0;
};

}   // namespace ffa
