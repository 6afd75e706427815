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

// A member that some kernels do without: with [[no_unique_address]] it takes no room there.
template <class Member>
struct Without {};

template <bool kIsThere, class Member>
using Maybe = typename Choose<kIsThere, Member, Without<Member>>::type;

}   // namespace ffa
