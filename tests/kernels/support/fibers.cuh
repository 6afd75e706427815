// Threads that take turns in one thread of a CPU: each goes on until it yields.
#pragma once

#undef _FORTIFY_SOURCE   // whose longjmp refuses to go to another stack
#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>

namespace fibers {

constexpr size_t kStackBytes = 1 << 16;

struct Fiber {
    ucontext_t start;
    jmp_buf place;   // where it has yielded
    bool is_started = false;
    bool is_done = false;
};

static thread_local Fiber* current;
static thread_local jmp_buf home;

// About to run body(), which ends with end(), on a stack of kStackBytes.
inline void prepare(Fiber& fiber, char* stack, void (*body)()) {
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = stack;
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, body, 0);
}

// swapcontext would ask the kernel for the mask of signals each time; _longjmp does not.
inline void yield() {
    if (_setjmp(current->place) == 0) {
        _longjmp(home, 1);
    }
}

inline void end() {
    current->is_done = true;
    yield();
}

// Until it yields.
inline void resume(Fiber& fiber) {
    current = &fiber;
    if (_setjmp(home) == 0) {
        if (fiber.is_started) {
            _longjmp(fiber.place, 1);
        }
        fiber.is_started = true;
        setcontext(&fiber.start);
    }
    current = nullptr;
}

}   // namespace fibers
