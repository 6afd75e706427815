// One of two types: the standard library's `conditional` needs headers that NVRTC does not have.
#pragma once

namespace ffa {

template <bool kCondition, class Then, class Else>
struct Choose {
    using type = Then;
};

template <class Then, class Else>
struct Choose<false, Then, Else> {
    using type = Else;
};

}   // namespace ffa
