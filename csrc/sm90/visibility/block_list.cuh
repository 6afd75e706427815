// The block lists of a BlockMask, as they lie in memory.
#pragma once

namespace ffa {

using Int = long long;

// The kv blocks of one kind that each q block looks at.
struct BlockList {
    const int* num_blocks;   // [batch, heads, q blocks]; null: there are none
    const int* indices;      // [batch, heads, q blocks, columns]
    Int num_blocks_strides[3];
    Int indices_strides[4];
    int num_heads, num_columns;   // of a row of indices; behind its count they mean nothing
};

}   // namespace ffa
