// In which order rows of dq will be complete: those of so many heads after those of as many others.
#pragma once

namespace ffa {

struct DqOrder {
    int heads_of_turn;   // divides the number of heads, and is divided by that of a group
    int passes;   // of a turn, each with all rows of as many query heads of each group, the last ones first
};

}  // namespace ffa
