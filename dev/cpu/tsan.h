// What device.cc tells g++'s thread sanitizer. Every CUDA thread, every stream and every engine for bulk copies is a
// thread to it, and they are ordered by what orders them in CUDA. Without SANITIZE=thread all functions here are empty.
//
// device.cc itself is compiled without the sanitizer's checks, since all threads of a block write its state. It reports
// the accesses that it makes for a kernel, and hides its mutexes, which order nothing in CUDA.
#pragma once

#include <cstddef>

#ifdef CPU_THREAD_SANITIZER
#include <sanitizer/tsan_interface.h>
extern "C" {
void __tsan_read_range(void *p, long bytes); // these are not in the interface's header
void __tsan_write_range(void *p, long bytes);
void __tsan_ignore_thread_begin();
void __tsan_ignore_thread_end();
void AnnotateIgnoreSyncBegin(const char *file, int line);
void AnnotateIgnoreSyncEnd(const char *file, int line);
}
#endif

namespace cpu::tsan {

#ifdef CPU_THREAD_SANITIZER
constexpr bool on = true;
using context = void *; // what the sanitizer takes for a thread

// As long as it lives, what this context reads and writes is not seen.
struct hide_accesses {
    hide_accesses() { __tsan_ignore_thread_begin(); }
    ~hide_accesses() { __tsan_ignore_thread_end(); }
};
// The same, and locks order nothing.
struct hide_sync : hide_accesses {
    hide_sync() { AnnotateIgnoreSyncBegin(__FILE__, __LINE__); }
    ~hide_sync() { AnnotateIgnoreSyncEnd(__FILE__, __LINE__); }
};

inline context create() {
    hide_sync without_order; // the creator is any thread of a block
    return __tsan_create_fiber(0);
}
inline void destroy(context c) {
    if (c) __tsan_destroy_fiber(c);
}
inline context current() { return __tsan_get_current_fiber(); }
inline void enter(context c) { __tsan_switch_to_fiber(c, __tsan_switch_to_fiber_no_sync); }

// Whatever was done before release(x) is ordered before what is done after a later acquire(x). x is an address.
inline void release(const void *x) { __tsan_release((void *)x); }
inline void acquire(const void *x) { __tsan_acquire((void *)x); }
inline void reads(const void *p, size_t bytes) { __tsan_read_range((void *)p, (long)bytes); }
inline void writes(void *p, size_t bytes) { __tsan_write_range(p, (long)bytes); }
#else
constexpr bool on = false;
using context = void *;
struct hide_sync {
    hide_sync() {}
};
struct hide_accesses {
    hide_accesses() {}
};
inline context create() { return nullptr; }
inline void destroy(context) {}
inline context current() { return nullptr; }
inline void enter(context) {}
inline void release(const void *) {}
inline void acquire(const void *) {}
inline void reads(const void *, size_t) {}
inline void writes(void *, size_t) {}
#endif

// Until it ends, the running code is another context's.
struct as {
    context before = current();
    explicit as(context c) { enter(c); }
    ~as() { enter(before); }
};

} // namespace cpu::tsan
