// The CPU device: what cuda_runtime.h, cooperative_groups.h and cuda/ptx declare. From the bottom up: stacks to switch
// between, the threads of a block and where they meet, clusters of blocks, barriers in shared memory and bulk copies,
// the blocks of a grid over the OS threads, then errors, memory, streams, queries and tensor maps.

#include "adversary.h"
#include "cuda_runtime.h"
#include "cuda/ptx"
#include "cudaTypedefs.h"
#include "tsan.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdarg>
#include <cstdlib>
#include <cxxabi.h>
#include <deque>
#include <dlfcn.h>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <sched.h>
#include <string>
#include <sys/mman.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <vector>

#ifdef __has_feature
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace cpu {

static adversary seed;
const bool hostile = seed.on, watched = tsan::on || hostile;
static const bool fixed_order = tsan::on || hostile; // which OS thread runs a block does not depend on time

constexpr int max_threads = 1024, max_warps = max_threads / 32;
constexpr int cluster_portable = 8, cluster_most = 16; // blocks
constexpr size_t shared_default = 48 << 10, shared_most = 227 << 10;

// ---------------------------------------------------------------------------------------------------------------------
// Contexts: where a stopped fiber goes on. switch_context saves the registers that a call must preserve on the stack,
// stores the stack pointer in *from, and takes up `to`. It ends in a return, not a jump: the CPU predicts returns from
// the calls that went before, and every fiber was left by the same calls, so this halves the cost of a barrier.

#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(BOOKENDS_UCONTEXT)
using context = void *;

extern "C" void cpu_switch_context(context *from, context to) __asm__("bookends_cpu_switch_context");

#ifdef __x86_64__
__asm__(R"(
    .text
    .globl bookends_cpu_switch_context
bookends_cpu_switch_context:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
constexpr int saved_words = 8, entry_word = 6; // six registers, the address to go on at, and none to return to
#else
__asm__(R"(
    .text
    .globl bookends_cpu_switch_context
    .p2align 2
bookends_cpu_switch_context:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
constexpr int saved_words = 20, entry_word = 11; // x30 is where ret goes
#endif

static void start_context(context *c, char *, char *top, void (*entry)()) {
    void **frame = (void **)top - saved_words;
    std::fill(frame, frame + saved_words, nullptr);
    frame[entry_word] = (void *)entry;
    *c = frame;
}
static void switch_context(context *from, context *to) { cpu_switch_context(from, *to); }
#else
} // namespace cpu
#include <ucontext.h>
namespace cpu {
using context = ucontext_t;

static void start_context(context *c, char *low, char *top, void (*entry)()) {
    getcontext(c);
    c->uc_stack.ss_sp = low;
    c->uc_stack.ss_size = (size_t)(top - low);
    c->uc_link = nullptr;
    makecontext(c, entry, 0);
}
static void switch_context(context *from, context *to) { swapcontext(from, to); }
#endif

// ---------------------------------------------------------------------------------------------------------------------
// The state of an OS thread that runs blocks.

// A stack, and where the code on it stopped. The first words of the stack, its low end, are the canary.
struct fiber {
    context stopped;
    char *stack;
    size_t stack_bytes;
    fiber *next_free;
    void *fake_stack;                // AddressSanitizer's
    tsan::context seen_as = nullptr; // by ThreadSanitizer: the thread of this stack
    bool spent = false;              // a thread of the block has run on it, which under ThreadSanitizer is enough
};

// A CUDA thread that waits: the fiber it waits on, and for a warp operation what it brings and then what it gets.
struct waiting {
    fiber *on;
    unsigned long long value;
    int source;
};

// The lanes of a warp that have arrived at one operation.
struct meeting {
    op what;
    unsigned mask, lanes;
};

// A block of a cluster, as the others see it.
constexpr unsigned long long busy = ~0ull, returned = ~0ull - 1;
struct seat {
    char *shared = nullptr;
    struct worker *runs = nullptr;                 // the OS thread
    std::atomic<unsigned long long> idle_at{busy}; // the cluster's `changes` at which all its threads had to wait
    std::atomic<unsigned> arrived{0};              // the cluster barrier's generation after the one it has arrived for
};

// The blocks of a cluster run at the same time, each on an OS thread of its own: so many OS threads go from cluster to
// cluster together. A launch without clusters has a cluster around every block.
struct cluster {
    int blocks = 1;
    size_t shared_bytes = 0;                         // of each
    unsigned long long number = 0;                   // which of the grid's it is
    std::atomic<unsigned> rounds{0}, ready{0};       // clusters started; blocks ready for the next
    std::atomic<unsigned> generation{0}, arrived{0}; // the cluster barrier: how often complete; blocks there since
    std::atomic<unsigned long long> changes{0};      // to what any thread may be waiting for: that, and mbarriers
    seat seats[cluster_most];
    unsigned long long taken = 0; // clusters of the grid, under ThreadSanitizer
    char start, end, barrier[2];  // for ThreadSanitizer: blocks begin, threads return, phases of the cluster barrier
};

// What a CUtensorMap holds.
struct tensor {
    uint64_t mark; // tensor_mark, by which a map is known
    char *base;
    uint64_t dims[2], row_bytes; // the last from row to row
    uint32_t box[2], rank, element_bytes, swizzled;
};
static_assert(sizeof(tensor) <= sizeof(CUtensorMap));
constexpr uint64_t tensor_mark = 0x7e2507ab0c5d1e5au;

// A tensor's box, and where it begins; of rank 0 where a bulk copy is just of bytes.
struct tile {
    tensor of;
    int32_t at[2];
};

// Bulk copies that nobody has waited for, thus not done: into shared memory, and out of it, where a thread groups them.
struct bulk_in {
    void *to;
    const void *from; // null: `value` is copied
    unsigned bytes;
    uint64_t *barrier;
    tile part;
    char value[16] = {};
    bool remote = false; // issued by another block
};
struct bulk_out {
    void *to;
    const void *from;
    unsigned bytes, group;
    int thread;
    tile part;
    std::vector<char> read = {}; // the source's contents at a wait for its reading alone
    bool written = false;        // before anybody waited
};

// A wgmma that takes effect at the wait for its batch.
struct product {
    int thread;
    unsigned batch;
    std::function<void()> multiply;
};

// A grid being run.
struct job {
    const void *kernel;
    const std::function<void()> *body;
    dim3 grid, block, cluster_size, clusters; // the last in clusters, the others in blocks and threads
    size_t shared;
    int cluster_blocks = 1, workers = 1;      // of a cluster; OS threads to take part, at most
    std::unique_ptr<cluster[]> gangs;         // the OS threads' clusters, where they are of more than a block
    unsigned long long units;                 // clusters
    int shift = 0;                            // which of the OS threads, or gangs, takes the first, where that is fixed
    std::atomic<bool> triggered{false};       // a thread lets the next kernel start early
    CUstream_st *stream = nullptr;
    std::unique_ptr<turns> turn;              // in adversary mode: the order of the OS threads
    std::vector<old_contents> *unseen = nullptr; // memory as seen by threads that have not waited for the predecessor
    bool hidden = false;                      // memory holds `unseen` at present
    unsigned long long unit_step = 1, first_unit = 0; // the i-th cluster: first_unit + i * unit_step
    bool waited = false, triggered_first = false; // a thread has waited; a thread triggered before any had waited
    std::atomic<unsigned long long> next_unit{0};
    std::atomic<bool> failed{false};
    std::string message; // written by whoever set `failed`
};

// An odd number of pages, so that one stack's hot end and the next one's don't compete for the same cache sets.
#ifdef __SANITIZE_ADDRESS__
constexpr size_t stack_bytes = 65 * 4096;
#else
constexpr size_t stack_bytes = 17 * 4096;
#endif
constexpr int stacks_per_chunk = 32;
constexpr size_t chunk_bytes = (stacks_per_chunk + 1) * stack_bytes; // the lowest stack may overflow into spare memory
constexpr uint64_t canary = 0x5afe57ac5afe57acu;

struct worker {
    fiber home{};           // the OS thread's own stack
    fiber *current = &home; // the stack that runs now
    fiber *free = nullptr;  // fibers that run no thread; each stopped in, or before, run_threads
    std::vector<std::unique_ptr<fiber>> fibers;
    std::vector<char *> chunks;
    char *shared = nullptr;
    size_t shared_bytes = 0;

    job *grid = nullptr;
    bool abandoned = false;     // the block was given up, with threads left on their fibers
    int threads = 0;            // of the block; those below `started` have been started, `live` have not returned
    int started = 0, live = 0;
    bool start_first = false;   // the next to run is a thread not started yet, not one that is ready
    uint3 next_index{};         // threadIdx of the next thread to start
    std::vector<void *> poisoned; // the block's __shared__ variables that have been filled already

    unsigned short ready[max_threads]; // a ring of the threads that waited and may go on
    unsigned ready_head = 0, ready_count = 0;

    op barrier_op{};
    int barrier_arrived = 0, barrier_votes = 0, barrier_result = 0;

    cluster alone, *gang = &alone; // the block's cluster
    int number = 0, rank = 0;      // of the OS thread in the job, and in the cluster
    uint3 place{};
    int cluster_arrived = 0;       // threads that have arrived at the cluster barrier; 0 again once all have
    bool cluster_used = false;     // `cluster_states` are not all 0
    unsigned char cluster_states[max_threads]{}; // 1, 2: has arrived in an even, odd generation, and not waited yet
    unsigned short parked[max_threads];          // the threads that wait there
    int parked_count = 0;

    std::vector<bulk_in> loads;
    std::vector<bulk_out> stores;
    std::vector<product> products;
    unsigned batches[max_threads]{};     // number of wgmma batches that each thread has committed
    int first_thread = 0, next_step = 1; // order in which threads start: first_thread + i * next_step
    int slow_warp = 0;                   // number of a warp that runs seldom; may exceed the number of warps
    bool starts_first = true;            // new threads start before ready threads continue
    unsigned round = 0;                  // ready threads that the seed chooses among
    unsigned groups[max_threads]{}; // that each thread has committed, ever

    // Threads poll when they wait for a barrier in shared memory. What shows that this is all they do:
    unsigned polled[max_warps]{};        // the lanes whose last turn ended with a poll in vain
    unsigned idle_pushes = 0;            // so often such a thread went into the ring
    unsigned seen_pushes = 0;            // how often the others had, when somebody polled last
    unsigned long long seen_changes = 0; // and the cluster's changes then
    unsigned idle_polls = 0;             // polls in vain since either was different
    int naps = 0;                        // the OS thread's, since then
    std::chrono::steady_clock::time_point stuck_since{}; // when the whole cluster was first seen so
    const char *poll_name = nullptr;     // the last poll, for the error; null: the cluster barrier
    uint64_t *poll_barrier = nullptr;
    unsigned poll_parity = 0;

    unsigned gone[max_warps];   // the lanes that have returned or never were
    int meetings[max_warps]{};  // how many of the warp's `meeting`s are open
    meeting meeting_of[max_warps][32];
    waiting waits[max_threads];

    // What ThreadSanitizer goes by. A char is an address where some release and others acquire.
    fiber *spent = nullptr;                     // stacks that are not used again in this block
    tsan::context loader{}, reader{}, writer{}; // engines: copies into shared memory, and both ends of copies out of it
    char issued, proxy;                         // copies are issued; fences of the asynchronous proxy
    char barrier_phase[2], warp_phase[max_warps][32][2]; // __syncthreads; __syncwarp, by the mask's first lane
    unsigned barriers = 0, warp_barriers[max_warps][32]{}; // complete, ever
    char read_groups[max_threads][8], written_groups[max_threads][8]; // each thread's copies out of shared memory
    bool fenced[max_threads];                                         // the thread has come by a fence
    const void *atomics[max_threads][4];                              // that it touched last
    unsigned char atomic_count[max_threads];

    ~worker() {
        for (char *chunk : chunks) munmap(chunk, chunk_bytes);
        ::free(shared);
    }
};

static thread_local worker *self = nullptr; // set while this OS thread runs blocks

static const char *const op_names[] = {
    "__syncthreads", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or", "__syncwarp",
    "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync",
    "__ballot_sync", "__any_sync", "__all_sync", "__match_any_sync",
    "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync", "__reduce_max_sync",
    "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync"};
static const char *name_of(op what) { return op_names[(int)what]; }

// ---------------------------------------------------------------------------------------------------------------------
// Fibers.

static void run_threads();

static std::string kernel_name(const void *kernel) {
    char address[32];
    snprintf(address, sizeof address, "at %p", kernel);
    Dl_info info;
    if (!dladdr(kernel, &info) || !info.dli_sname || info.dli_saddr != kernel) return address; // static?
    int status;
    char *words = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
    std::string name = words ? words : info.dli_sname;
    free(words);
    return name.compare(0, 5, "void ") == 0 ? name.substr(5) : name; // templates come with their return type
}

// Stops the program if a thread has left its stack: memory that is not its own has been written, so nothing is safe.
static inline void check_stack(worker &w) {
    const fiber &f = *w.current;
    if (&f == &w.home) return;
    uint64_t low;
    memcpy(&low, f.stack, sizeof low);
    if (low == canary && (char *)__builtin_frame_address(0) > f.stack) return;
    fprintf(stderr, "kernel %s: thread %d of block (%u,%u,%u) overflowed its stack of %zu bytes\n",
            kernel_name(w.grid->kernel).c_str(), thread_index, blockIdx.x, blockIdx.y, blockIdx.z, stack_bytes);
    abort();
}

// The sanitizer is told of every switch, and of where the stack that it comes from lies.
static void arrived([[maybe_unused]] worker &w, [[maybe_unused]] void *fake_stack) {
#ifdef __SANITIZE_ADDRESS__
    const void *low;
    size_t bytes;
    __sanitizer_finish_switch_fiber(fake_stack, &low, &bytes);
    if (!w.home.stack) w.home.stack = (char *)low, w.home.stack_bytes = bytes; // the first switch comes from home
#endif
}

// Goes on with `to`. With `last` set, the code that calls this never goes on.
static void switch_to(worker &w, fiber *to, [[maybe_unused]] bool last = false) {
    check_stack(w);
    fiber *from = w.current;
    w.current = to;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(last ? nullptr : &from->fake_stack, to->stack, to->stack_bytes);
#endif
    tsan::enter(to->seen_as);
    switch_context(&from->stopped, &to->stopped);
    arrived(w, from->fake_stack);
}

// Makes a fiber's stack as good as new, and frees the fiber.
static void reset_fiber(worker &w, fiber *f, int number) {
    char *top = f->stack + stack_bytes - number % 32 * 128; // staggered, again for the caches
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(f->stack, stack_bytes);
#endif
    memcpy(f->stack, &canary, sizeof canary);
    f->fake_stack = nullptr;
    f->spent = false;
    f->seen_as = nullptr; // what the sanitizer has of one that was left in the middle of things is not used again
    start_context(&f->stopped, f->stack, top, run_threads);
    f->next_free = w.free;
    w.free = f;
}

static fiber *take_free_fiber(worker &w) {
    tsan::hide_accesses own;
    if (!w.free) {
        void *chunk = mmap(nullptr, chunk_bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (chunk == MAP_FAILED) {
            fprintf(stderr, "no memory for the stacks of a block's threads\n");
            abort();
        }
#ifdef MADV_NOHUGEPAGE
        madvise(chunk, chunk_bytes, MADV_NOHUGEPAGE); // most of a stack is never touched
#endif
        w.chunks.push_back((char *)chunk);
        for (int i = 0; i < stacks_per_chunk; i++) {
            w.fibers.push_back(std::make_unique<fiber>());
            w.fibers.back()->stack = (char *)chunk + (i + 1) * stack_bytes;
            w.fibers.back()->stack_bytes = stack_bytes;
            reset_fiber(w, w.fibers.back().get(), (int)w.fibers.size());
        }
    }
    fiber *f = w.free;
    w.free = f->next_free;
    if (!f->seen_as) f->seen_as = tsan::create();
    return f;
}

// Puts the running fiber where it is found again: to be run by others, or under ThreadSanitizer by the next block.
static void put_back(worker &w) {
    fiber *&list = w.current->spent ? w.spent : w.free;
    w.current->next_free = list;
    list = w.current;
}

static void push_ready(worker &w, int thread) {
    w.ready[(w.ready_head + w.ready_count++) % max_threads] = (unsigned short)thread;
}
// In adversary mode the seed chooses among the threads of one round: all that were ready when the round began. A slow
// warp's threads are mostly put back.
static int pop_ready(worker &w) {
    for (unsigned tries = 0; hostile; tries++) {
        if (w.round == 0 || w.round > w.ready_count) w.round = w.ready_count;
        unsigned short &head = w.ready[w.ready_head % max_threads];
        std::swap(head, w.ready[(w.ready_head + seed.draw(w.round)) % max_threads]);
        w.round--;
        if (head / 32 != w.slow_warp || tries >= w.ready_count || seed.once_in(16)) break;
        const int passed_over = head;
        w.ready_head++, w.ready_count--;
        push_ready(w, passed_over);
        w.idle_pushes++;
    }
    w.ready_count--;
    return w.ready[w.ready_head++ % max_threads];
}

// Leaves the block where it stands and never comes back.
[[noreturn]] static void abandon(worker &w) {
    w.abandoned = true;
    switch_to(w, &w.home, true);
    __builtin_unreachable();
}

void fail(const char *format, ...) {
    tsan::hide_accesses own;
    char what[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    if (!self) {
        fprintf(stderr, "%s, outside any kernel\n", what);
        abort();
    }
    {
        static std::mutex one_at_a_time;
        std::lock_guard<std::mutex> lock(one_at_a_time);
        job &j = *self->grid;
        char where[64];
        snprintf(where, sizeof where, ", block (%u,%u,%u): ", blockIdx.x, blockIdx.y, blockIdx.z);
        if (!j.failed) j.message = "kernel " + kernel_name(j.kernel) + where + what;
        if (!j.failed && hostile) j.message += std::string(" (BOOKENDS_ADVERSARY=") + seed.name + ")";
        j.failed = true;
        tsan::release(&j);
    }
    abandon(*self);
}

// The running thread waits until it is taken from the ready ring; meanwhile this OS thread does something else.
static void wait(worker &w) {
    if (w.grid->failed.load(std::memory_order_relaxed)) abandon(w);
    const int index = thread_index;
    const uint3 coordinates = threadIdx;
    w.waits[index].on = w.current;
    fiber *next = w.ready_count && !w.start_first ? w.waits[pop_ready(w)].on : take_free_fiber(w);
    if (next != w.current) switch_to(w, next);
    thread_index = index;
    threadIdx = coordinates;
}

static bool release_parked(worker &w);

// The running thread lets all others run first.
static void step_back(worker &w) {
    release_parked(w);
    push_ready(w, thread_index);
    w.start_first = w.started < w.threads; // or those that yield would pass the turn among themselves
    if (hostile && w.start_first) w.start_first = seed.draw(8) != 0 ? w.starts_first : !w.starts_first;
    wait(w);
}

// In adversary mode: a point where other threads may run first.
static void interleave(worker &w) {
    if (!hostile) return;
    if (seed.draw(8) == 0) w.grid->turn->pass(seed, w.number, false);
    if (seed.draw(64) == 0) w.slow_warp = (int)seed.draw(2 * max_warps);
    if (seed.draw(2) == 0) step_back(w);
}

void yield() {
    unsigned &polled = self->polled[thread_index / 32];
    if (polled >> thread_index % 32 & 1) self->idle_pushes++; // it only sleeps between two polls
    polled &= ~(1u << thread_index % 32);
    step_back(*self);
}

// ---------------------------------------------------------------------------------------------------------------------
// Where the threads of a block meet.

int barrier(op what, int predicate) {
    worker &w = *self;
    if (w.barrier_arrived == 0) w.barrier_op = what;
    if (w.barrier_op != what) fail("threads wait at %s and at %s", name_of(w.barrier_op), name_of(what));
    w.barrier_votes += predicate != 0;
    const char *const phase = &w.barrier_phase[w.barriers % 2];
    tsan::release(phase);
    if (++w.barrier_arrived < w.threads) {
        wait(w);
        tsan::acquire(phase);
        return w.barrier_result; // stands until all have read it: no barrier is complete without them
    }
    w.barrier_result = what == op::syncthreads_and  ? w.barrier_votes == w.threads
                       : what == op::syncthreads_or ? w.barrier_votes != 0
                                                    : w.barrier_votes;
    w.barrier_arrived = w.barrier_votes = 0;
    w.barriers++;
    for (int t = 0; t < w.threads; t++)
        if (t != thread_index) push_ready(w, t);
    tsan::acquire(phase);
    const int result = w.barrier_result;
    interleave(w);
    return result;
}

// The lane a shuffle reads. As the hardware has it, a lane that would leave its segment of `width` lanes reads itself.
int source_lane(op what, int operand, int width) {
    if (width < 1 || width > 32 || (width & (width - 1))) fail("%s with width %d", name_of(what), width);
    const int lane = thread_index & 31, first = lane & -width, last = first + width - 1, source = operand & 31;
    switch (what) {
    case op::shfl: return first | (operand & (width - 1));
    case op::shfl_up: return lane - source >= first ? lane - source : lane;
    case op::shfl_down: return lane + source <= last ? lane + source : lane;
    default: return (lane ^ source) <= last ? lane ^ source : lane;
    }
}

// What a reduction over `values` gives; votes count 0 and 1.
static unsigned reduce(op what, const unsigned *values, int count) {
    unsigned r = values[0];
    for (int i = 1; i < count; i++) {
        const unsigned v = values[i];
        switch (what) {
        case op::add: r += v; break;
        case op::min_signed: r = (unsigned)std::min((int)r, (int)v); break;
        case op::max_signed: r = (unsigned)std::max((int)r, (int)v); break;
        case op::min_unsigned: r = std::min(r, v); break;
        case op::max_unsigned: r = std::max(r, v); break;
        case op::all:
        case op::bits_and: r &= v; break;
        case op::any:
        case op::bits_or: r |= v; break;
        default: r ^= v; break;
        }
    }
    return r;
}

// If all lanes of the meeting that can come have come, gives each its result, lets them go on and closes the meeting.
static bool finish_meeting(worker &w, int warp, int index) {
    const meeting m = w.meeting_of[warp][index];
    if ((m.mask & ~w.gone[warp]) != m.lanes) return false;
    waiting *waits = w.waits + warp * 32;
    unsigned long long values[32];
    unsigned words[32], ballot = 0;
    int lanes[32], count = 0;
    for (unsigned rest = m.lanes; rest; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        values[lane] = waits[lane].value;
        words[count] = (unsigned)values[lane];
        ballot |= (unsigned)(values[lane] != 0) << lane;
        lanes[count++] = lane;
    }
    const bool shuffles = m.what >= op::shfl && m.what <= op::shfl_xor;
    unsigned one_for_all = 0;
    if (m.what == op::ballot) one_for_all = ballot;
    else if (!shuffles && m.what != op::syncwarp && m.what != op::match_any) one_for_all = reduce(m.what, words, count);
    for (int i = 0; i < count; i++) {
        const int lane = lanes[i], from = waits[lane].source;
        unsigned long long result = one_for_all;
        if (shuffles) {
            if (!(m.lanes >> from & 1)) {
                const char *why = !(m.mask >> from & 1)          ? "not in the mask"
                                  : warp * 32 + from < w.threads ? "one that has returned"
                                                                 : "beyond the block";
                fail("%s (mask 0x%08x) of warp %d: lane %d reads lane %d, which is %s", name_of(m.what), m.mask, warp,
                     lane, from, why);
            }
            result = values[from];
        } else if (m.what == op::match_any) {
            for (int j = 0; j < count; j++)
                if (values[lanes[j]] == values[lane]) result |= 1ull << lanes[j];
        }
        waits[lane].value = result;
        if (warp * 32 + lane != thread_index) push_ready(w, warp * 32 + lane);
    }
    w.meeting_of[warp][index] = w.meeting_of[warp][--w.meetings[warp]];
    if (m.what == op::syncwarp) w.warp_barriers[warp][__builtin_ctz(m.mask)]++;
    return true;
}

// Lanes whose operation and mask agree meet, in any order; whoever comes last computes for all. Of all operations only
// __syncwarp orders memory.
unsigned long long meet(op what, unsigned mask, unsigned long long value, int source) {
    worker &w = *self;
    const int index = thread_index, warp = index / 32, lane = index % 32;
    if (!(mask >> lane & 1)) fail("%s (mask 0x%08x) called by lane %d of warp %d", name_of(what), mask, lane, warp);
    w.waits[index].value = value;
    w.waits[index].source = source;
    int i = 0;
    while (i < w.meetings[warp] && (w.meeting_of[warp][i].what != what || w.meeting_of[warp][i].mask != mask)) i++;
    if (i == w.meetings[warp]) w.meeting_of[warp][w.meetings[warp]++] = {what, mask, 0};
    w.meeting_of[warp][i].lanes |= 1u << lane;
    const int first = __builtin_ctz(mask);
    const char *const phase = &w.warp_phase[warp][first][w.warp_barriers[warp][first] % 2];
    if (what == op::syncwarp) tsan::release(phase);
    if (!finish_meeting(w, warp, i)) wait(w);
    if (what == op::syncwarp) tsan::acquire(phase);
    const unsigned long long result = w.waits[index].value;
    interleave(w);
    return result;
}

// What holds a block up in which every thread left waits, and for something that cannot come.
static std::string why_stuck(const worker &w) {
    std::string what;
    char part[160];
    if (w.barrier_arrived) {
        snprintf(part, sizeof part, "%s reached by %d of %d threads (%d returned", name_of(w.barrier_op),
                 w.barrier_arrived, w.threads, w.threads - w.live);
        what = part;
        int elsewhere = 0;
        for (int warp = 0; warp < max_warps; warp++)
            for (int i = 0; i < w.meetings[warp]; i++) elsewhere += __builtin_popcount(w.meeting_of[warp][i].lanes);
        what += elsewhere ? ", " + std::to_string(elsewhere) + " wait in their warp)" : ")";
    }
    if (w.cluster_arrived) {
        snprintf(part, sizeof part, "%scluster.sync() reached by %d of %d threads of the block (%d returned)",
                 what.empty() ? "" : "; ", w.cluster_arrived, w.threads, w.threads - w.live);
        what += part;
    }
    for (int warp = 0; warp < max_warps; warp++) {
        if (!w.meetings[warp]) continue;
        what += (what.empty() ? "warp " : "; warp ") + std::to_string(warp);
        for (int i = 0; i < std::min(w.meetings[warp], 3); i++) {
            const meeting &m = w.meeting_of[warp][i];
            snprintf(part, sizeof part, "%s lanes 0x%08x wait at %s (mask 0x%08x)", i ? "," : ":", m.lanes,
                     name_of(m.what), m.mask);
            what += part;
        }
        break; // one warp explains it
    }
    return what;
}

[[noreturn]] static void fail_stuck(const worker &w) {
    tsan::hide_accesses own;
    char what[512]; // not a string: fail() does not return, so nobody would free it
    snprintf(what, sizeof what, "%s", why_stuck(w).c_str());
    fail("%s", what);
}

void poison(void *p, size_t bytes) {
    for (void *seen : self->poisoned)
        if (seen == p) return;
    tsan::hide_accesses own;
    self->poisoned.push_back(p);
    memset(p, 0xff, bytes);
}

// ---------------------------------------------------------------------------------------------------------------------
// Atomics and fences, for ThreadSanitizer, which does not understand fences. An atomic operation releases if its thread
// has come by a fence before. A fence acquires from the words that its thread touched atomically last.

void before_atomic(const void *p) {
    if (self) interleave(*self);
    if (self && self->fenced[thread_index]) tsan::release(p);
}

void after_atomic(const void *p) {
    if (!self) return;
    worker &w = *self;
    w.atomics[thread_index][w.atomic_count[thread_index]++ % 4] = p;
    interleave(w);
}

void at_fence() {
    if (!self) return;
    worker &w = *self;
    for (int i = 0; i < std::min<int>(w.atomic_count[thread_index], 4); i++) tsan::acquire(w.atomics[thread_index][i]);
    w.fenced[thread_index] = true;
    interleave(w);
}

void at_dependency_trigger() {
    if (!self) return;
    job &j = *self->grid;
    if (hostile && !j.waited) j.triggered_first = true;
    j.triggered.store(true, std::memory_order_relaxed);
}

void at_proxy_fence() {
    if (!self) return;
    tsan::release(&self->proxy);
    interleave(*self);
}

// ---------------------------------------------------------------------------------------------------------------------
// Waiting for what other threads bring about at their leisure: the cluster barrier, where threads are parked, and
// barriers in shared memory, which they poll. Once no thread of a cluster does anything else, nothing will ever change.

// For a new block.
static void reset_waits(worker &w) {
    if (w.cluster_used) memset(w.cluster_states, 0, sizeof w.cluster_states);
    w.cluster_used = false;
    w.idle_polls = 0;
    w.cluster_arrived = w.parked_count = 0;
}

// Gives the processor to other OS threads, and after a while of that rests itself.
static void nap(worker &w, int naps) {
    if (hostile) w.grid->turn->pass(seed, w.number, false);
    if (naps < 100) sched_yield();
    else usleep(50);
}

static std::string describe(const worker &w, const uint64_t *barrier);

[[noreturn]] static void fail_idle(const worker &w) {
    tsan::hide_accesses own;
    char what[512];
    {
        const cluster &c = *w.gang;
        std::string words;
        char part[200];
        if (w.poll_name) {
            snprintf(part, sizeof part, "thread (%u,%u,%u) waits in %s for parity %u of ", threadIdx.x, threadIdx.y,
                     threadIdx.z, w.poll_name, w.poll_parity);
            words = part + describe(w, w.poll_barrier);
        } else {
            snprintf(part, sizeof part, "cluster.sync() reached by %u of %d blocks", c.arrived.load(), c.blocks);
            words = part;
        }
        if (const std::string more = why_stuck(w); !more.empty()) words += "; " + more;
        for (int i = 0; i < c.blocks; i++) {
            const bool gone = c.seats[i].idle_at.load() == returned;
            if (!gone && (w.poll_name || c.seats[i].arrived.load() == c.generation.load() + 1)) continue;
            words += "; block " + std::to_string(i) + " of the cluster " + (gone ? "returned" : "waits elsewhere");
        }
        snprintf(what, sizeof what, "%s", words.c_str());
    }
    fail("%s, and nothing happens any more", what);
}

// To be called when all threads of the block have been found waiting since the cluster's changes were `seen_changes`.
static void rest(worker &w) {
    if (w.grid->failed.load(std::memory_order_relaxed)) abandon(w);
    tsan::hide_accesses own;
    cluster &c = *w.gang;
    c.seats[w.rank].idle_at.store(w.seen_changes, std::memory_order_release);
    bool stuck = true;
    for (int i = 0; i < c.blocks; i++) {
        const unsigned long long at = c.seats[i].idle_at.load(std::memory_order_acquire);
        stuck &= at == w.seen_changes || at == returned;
    }
    stuck &= c.changes.load(std::memory_order_acquire) == w.seen_changes;
    // It could be that polls are mixed with looks at global memory, which other clusters write: so not at once.
    const auto now = std::chrono::steady_clock::now();
    if (!stuck || w.naps == 0) w.stuck_since = now;
    else if (hostile ? w.naps > 100 * (int)(w.ready_count + 1) // any thread may be slow
                     : now - w.stuck_since > std::chrono::milliseconds(500)) fail_idle(w);
    nap(w, w.naps++);
}

// The block's state of affairs has changed since it was last idle.
static void not_idle(worker &w, unsigned long long changes) {
    w.gang->seats[w.rank].idle_at.store(busy, std::memory_order_release);
    w.seen_changes = changes;
    w.idle_polls = 0;
    w.naps = 0;
}

// Lets those go on that have waited at the cluster barrier, if it is complete.
static bool release_parked(worker &w) {
    if (!w.parked_count) return false;
    const unsigned generation = w.gang->generation.load(std::memory_order_acquire);
    if (w.cluster_states[w.parked[0]] == 1 + generation % 2) return false;
    for (int i = 0; i < w.parked_count; i++) push_ready(w, w.parked[i]);
    w.parked_count = 0;
    return true;
}

// After a poll in vain: lets other threads of the block run, and rests when all of them have polled in vain, twice.
static void poll_again(worker &w) {
    const unsigned long long changes = w.gang->changes.load(std::memory_order_acquire);
    const unsigned pushes = w.ready_head + w.ready_count - w.idle_pushes;
    if (w.started < w.threads || changes != w.seen_changes || pushes != w.seen_pushes) {
        not_idle(w, changes);
        w.seen_pushes = pushes;
    } else if (++w.idle_polls > 2 * (w.ready_count + 1)) {
        rest(w);
    }
    w.polled[thread_index / 32] |= 1u << thread_index % 32;
    w.idle_pushes++;
    step_back(w);
}

void cluster_arrive() {
    worker &w = *self;
    cluster &c = *w.gang;
    unsigned char &state = w.cluster_states[thread_index];
    if (state) fail("thread %d arrives at the cluster barrier again without having waited there", thread_index);
    const unsigned generation = c.generation.load(std::memory_order_acquire); // it stands until this block is all there
    state = 1 + generation % 2;
    w.cluster_used = true;
    tsan::release(&c.barrier[generation % 2]);
    if (++w.cluster_arrived < w.threads) return;
    w.cluster_arrived = 0;
    c.seats[w.rank].arrived.store(generation + 1, std::memory_order_relaxed);
    if (c.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == (unsigned)c.blocks) {
        c.arrived.store(0, std::memory_order_relaxed);
        c.generation.store(generation + 1, std::memory_order_release);
    }
    c.changes.fetch_add(1, std::memory_order_release);
}

void cluster_wait() {
    worker &w = *self;
    unsigned char &state = w.cluster_states[thread_index];
    if (!state) fail("thread %d waits at the cluster barrier and has not arrived", thread_index);
    release_parked(w); // so that all those parked wait for the same
    if (state == 1 + w.gang->generation.load(std::memory_order_acquire) % 2) {
        w.parked[w.parked_count++] = (unsigned short)thread_index;
        wait(w);
    }
    tsan::acquire(&w.gang->barrier[state - 1]);
    state = 0;
    interleave(w);
}

// No thread of the block can go on unless the cluster barrier lets it.
static void wait_for_cluster(worker &w) {
    const unsigned long long changes = w.gang->changes.load(std::memory_order_acquire);
    if (release_parked(w)) return;
    if (!w.parked_count || w.cluster_arrived) fail_stuck(w);
    if (changes != w.seen_changes) not_idle(w, changes);
    w.poll_name = nullptr;
    rest(w);
}

// ---------------------------------------------------------------------------------------------------------------------
// The shared memory of a cluster.

unsigned cluster_rank() { return (unsigned)self->rank; }
unsigned cluster_blocks() { return (unsigned)self->gang->blocks; }

// The block of the cluster whose dynamic shared memory p points into, or -1.
static int owner(const worker &w, const void *p) {
    const cluster &c = *w.gang;
    for (int i = 0; i < c.blocks; i++)
        if ((uintptr_t)p - (uintptr_t)c.seats[i].shared < w.grid->shared) return i;
    return -1;
}

static void check_there(const worker &w, const char *name, int rank) {
    if (rank < 0 || rank == w.rank || w.gang->seats[rank].idle_at.load(std::memory_order_acquire) != returned) return;
    fail("%s: block %d of the cluster has returned, and its shared memory with it", name, rank);
}

unsigned shared_rank(const void *p) {
    const int rank = owner(*self, p);
    if (rank < 0) fail("query_shared_rank: %p is not in the cluster's dynamic shared memory", p);
    return (unsigned)rank;
}

void *map_shared(const void *p, unsigned rank) {
    const worker &w = *self;
    const cluster &c = *w.gang;
    if (rank >= (unsigned)c.blocks) fail("map_shared_rank: rank %u of a cluster of %d", rank, c.blocks);
    const size_t offset = (uintptr_t)p - (uintptr_t)w.shared;
    if (offset >= w.grid->shared)
        fail("map_shared_rank: %p is not in the block's dynamic shared memory, and no other is mapped", p);
    check_there(w, "map_shared_rank", (int)rank);
    return c.seats[rank].shared + offset;
}

// ---------------------------------------------------------------------------------------------------------------------
// Barriers in shared memory. A phase is complete when all arrivals have come, and all bytes that were announced.

constexpr int mbarrier_most = (1 << 20) - 1; // arrivals, and bytes on the way
struct mbarrier {
    unsigned pending, expected; // arrivals to come in this phase; in each
    int bytes;                  // to come, or where negative come before they were announced
    unsigned phase;             // its parity
};

// From the lowest bit: 20 of pending, 20 of expected, 21 of bytes, 1 of phase, and 01, which fresh memory has not.
static bool is_mbarrier(uint64_t word) { return word >> 62 == 1; }
static uint64_t pack(const mbarrier &b) {
    return b.pending | (uint64_t)b.expected << 20 | (uint64_t)(b.bytes & 0x1fffff) << 40 | (uint64_t)b.phase << 61 |
           (uint64_t)1 << 62;
}
static mbarrier unpack(uint64_t word) {
    const int bytes = (int)(word >> 40 & 0x1fffff);
    return {(unsigned)(word & mbarrier_most), (unsigned)(word >> 20 & mbarrier_most), bytes - (bytes >> 20 << 21),
            (unsigned)(word >> 61 & 1)};
}

static std::string where(const worker &w, const void *p) {
    char words[100];
    const int rank = owner(w, p);
    if (rank < 0) {
        snprintf(words, sizeof words, "at %p", p);
        return words;
    }
    const ptrdiff_t byte = (const char *)p - w.gang->seats[rank].shared;
    snprintf(words, sizeof words, "at byte %td of the dynamic shared memory", byte);
    return w.gang->blocks == 1 ? words : words + (" of block " + std::to_string(rank)) + " of the cluster";
}

static std::string describe(const worker &w, const uint64_t *barrier) {
    const mbarrier b = unpack(__atomic_load_n(barrier, __ATOMIC_RELAXED));
    char words[100];
    snprintf(words, sizeof words, " (parity now %u; to come: %u of %u arrivals, %d bytes)", b.phase, b.pending,
             b.expected, b.bytes);
    return "the mbarrier " + where(w, barrier) + words;
}

// As fail(), with the barrier's place, or also its state, after `what`.
[[noreturn]] static void fail_at(const worker &w, const uint64_t *barrier, const char *name, const char *what,
                                 bool state = false) {
    char words[400];
    snprintf(words, sizeof words, "%s", (state ? describe(w, barrier) : "the mbarrier " + where(w, barrier)).c_str());
    fail("%s: %s%s", name, words, what);
}

static void check_barrier(const worker &w, const char *name, bool near, const uint64_t *barrier) {
    if ((uintptr_t)barrier % 8) fail("%s: the mbarrier at %p is not aligned to 8 bytes", name, (const void *)barrier);
    if (w.gang->blocks == 1) return;
    const int rank = owner(w, barrier);
    if (near && rank >= 0 && rank != w.rank) fail_at(w, barrier, name, " is not the block's own");
    check_there(w, name, rank);
}

static mbarrier read(const worker &w, const char *name, const uint64_t *barrier, uint64_t word) {
    if (!is_mbarrier(word)) fail_at(w, barrier, name, " has not been initialised");
    return unpack(word);
}

void mbarrier_init(uint64_t *barrier, unsigned count) {
    const worker &w = *self;
    check_barrier(w, "mbarrier_init", true, barrier);
    if (count < 1 || count > (unsigned)mbarrier_most) fail("mbarrier_init: a count of %u", count);
    __atomic_store_n(barrier, pack({count, count, 0, 0}), __ATOMIC_RELEASE);
    w.gang->changes.fetch_add(1, std::memory_order_release);
}

// Bytes are announced where positive, and have come where negative; then threads arrive. Returns what was there before.
static uint64_t update(const worker &w, const char *name, uint64_t *barrier, long long bytes, unsigned arrivals) {
    uint64_t seen = __atomic_load_n(barrier, __ATOMIC_ACQUIRE);
    for (;;) {
        mbarrier b = read(w, name, barrier, seen);
        if (arrivals > b.pending) fail_at(w, barrier, name, " gets more arrivals than its phase expects", true);
        if (std::abs(b.bytes + bytes) > mbarrier_most) fail_at(w, barrier, name, " gets beyond 2^20-1 bytes", true);
        b.pending -= arrivals;
        b.bytes += (int)bytes;
        if (!b.pending && !b.bytes) b.phase ^= 1, b.pending = b.expected;
        if (__atomic_compare_exchange_n(barrier, &seen, pack(b), true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) break;
    }
    w.gang->changes.fetch_add(1, std::memory_order_release);
    return seen;
}

// For ThreadSanitizer, what happens before the barrier's phase of this parity is complete.
static const char *phase_of(const uint64_t *barrier, unsigned parity) { return (const char *)barrier + parity; }
static const char *phase_of(const uint64_t *barrier) {
    return phase_of(barrier, unpack(__atomic_load_n(barrier, __ATOMIC_ACQUIRE)).phase);
}

uint64_t mbarrier_update(const char *name, bool near, uint64_t *barrier, unsigned expect, unsigned arrivals,
                         bool releases) {
    check_barrier(*self, name, near, barrier);
    if (tsan::on && releases) tsan::release(phase_of(barrier));
    const uint64_t state = update(*self, name, barrier, expect, arrivals);
    interleave(*self);
    return state;
}

unsigned mbarrier_parity(uint64_t state) {
    if (!is_mbarrier(state)) fail("a wait for 0x%llx, which is no mbarrier's state", (unsigned long long)state);
    return unpack(state).phase;
}

// Where a row of a tensor ends for a copy, in bytes from its beginning: stores write all of its last 16 bytes (as an
// H200 does), even if the tensor has only some of them.
static int64_t row_end(const tensor &of, bool load) {
    const int64_t bytes = (int64_t)of.dims[0] * of.element_bytes;
    return load ? bytes : (bytes + 15) / 16 * 16;
}

// The bytes of each row of the box, where they are in the tensor.
template <class F> static void each_row(const tile &t, bool load, F f) {
    const tensor &of = t.of;
    const int64_t size = of.element_bytes, x = t.at[0] * size;
    const int64_t begin = std::max<int64_t>(x, 0), end = std::min(x + of.box[0] * size, row_end(of, load));
    const int64_t last = std::min<int64_t>(t.at[1] + (int64_t)of.box[1], (int64_t)of.dims[1]);
    for (int64_t y = std::max(t.at[1], 0); begin < end && y < last; y++)
        f(of.base + y * (int64_t)of.row_bytes + begin, (size_t)(end - begin));
}

// Moves what is inside of the tensor; the rest of the box becomes 0 in shared memory. A swizzle moves the 16-byte parts
// of every 128 bytes of shared memory: the number of each, bits 4 to 6 of its address, is XORed with bits 7 to 9.
static void move_tile(const tile &t, char *shared, bool load) {
    const tensor &of = t.of;
    const int64_t size = of.element_bytes, row = of.box[0] * size, part = of.swizzled ? 16 : row, x = t.at[0];
    const int64_t begin = std::clamp<int64_t>(-x * size, 0, row);
    const int64_t end = std::clamp<int64_t>(row_end(of, load) - x * size, begin, row); // of a row, inside
    for (uint32_t r = 0; r < of.box[1]; r++) {
        const int64_t y = t.at[1] + (int64_t)r;
        const bool inside = y >= 0 && y < (int64_t)of.dims[1];
        for (int64_t i = 0; i < row; i += part) {
            uintptr_t place = (uintptr_t)shared + r * row + i;
            if (of.swizzled) place ^= place >> 3 & 0x70;
            const int64_t from = std::clamp(begin, i, i + part), to = std::clamp(end, i, i + part);
            if (load) memset((void *)place, 0, part);
            if (!inside || from >= to) continue;
            char *const here = (char *)place + (from - i);
            char *const there = of.base + (y * (int64_t)of.row_bytes + x * size + from);
            memcpy(load ? here : there, load ? there : here, to - from);
        }
    }
}

static void finish(const worker &w, const bulk_in &copy) {
    tsan::hide_accesses seen_at_issue;
    if (copy.part.of.rank) move_tile(copy.part, (char *)copy.to, true);
    else memcpy(copy.to, copy.from ? copy.from : copy.value, copy.bytes);
    update(w, "cp_async_bulk", copy.barrier, -(long long)copy.bytes, 0);
}

static void finish_loads(worker &w, const uint64_t *barrier) {
    size_t left = 0;
    for (const bulk_in &copy : w.loads) {
        if (copy.barrier == barrier) {
            finish(w, copy);
        } else {
            w.loads[left++] = copy;
        }
    }
    w.loads.resize(left);
}

bool mbarrier_poll(const char *name, uint64_t *barrier, unsigned parity) {
    worker &w = *self;
    check_barrier(w, name, true, barrier);
    if (parity > 1) fail("%s: a parity of %u", name, parity);
    if (!w.loads.empty()) finish_loads(w, barrier);
    const mbarrier b = read(w, name, barrier, __atomic_load_n(barrier, __ATOMIC_ACQUIRE));
    if (b.phase != parity) {
        tsan::acquire(phase_of(barrier, parity));
        interleave(w);
        return true;
    }
    w.poll_name = name;
    w.poll_barrier = barrier;
    w.poll_parity = parity;
    poll_again(w);
    return false;
}

// ---------------------------------------------------------------------------------------------------------------------
// Bulk copies. They take effect at the wait for them, the latest time allowed; in adversary mode at once or
// at the wait.

static void check_memory([[maybe_unused]] const void *p, [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_ADDRESS__ // complains here, in the kernel's line, not where the copy is done
    if (const void *bad = __asan_region_is_poisoned((void *)p, bytes)) (void)*(const volatile char *)bad;
#endif
}

static void check_bulk(const worker &w, const char *name, const void *to, const void *from, unsigned bytes,
                       const void *shared) {
    const int rank = owner(w, shared);
    if (rank >= 0 && (const char *)shared + bytes > w.gang->seats[rank].shared + w.grid->shared)
        fail("%s of %u bytes from %p to %p: beyond the dynamic shared memory", name, bytes, from, to);
    check_there(w, name, rank);
}

static void check_bytes(const worker &w, const void *to, const void *from, unsigned bytes, const void *shared) {
    if (((uintptr_t)to | (uintptr_t)from | bytes) % 16)
        fail("cp_async_bulk of %u bytes from %p to %p: all must be multiples of 16", bytes, from, to);
    check_bulk(w, "cp_async_bulk", to, from, bytes, shared);
    check_memory(to, bytes);
    check_memory(from, bytes);
}

// What ThreadSanitizer sees of a copy: accesses by the engines, from the copy's issue until a thread waits for it. The
// loader comes after the issue. The reader of what is stored comes after fences of the asynchronous proxy and after
// loads, but not after other writes of the thread that issues the copy.
static void see_load(worker &w, const bulk_in &copy) {
    if (!tsan::on) return;
    if (!w.loader) w.loader = tsan::create();
    tsan::release(&w.issued);
    tsan::as engine(w.loader);
    tsan::acquire(&w.issued);
    if (copy.part.of.rank) each_row(copy.part, true, [](char *row, size_t bytes) { tsan::reads(row, bytes); });
    else if (copy.from) tsan::reads(copy.from, copy.bytes);
    tsan::writes(copy.to, copy.bytes);
    tsan::release(&w.proxy);
    tsan::release(phase_of(copy.barrier));
}

static void see_store(worker &w, const bulk_out &copy) {
    if (!tsan::on) return;
    if (!w.reader) w.reader = tsan::create(), w.writer = tsan::create();
    tsan::release(&w.issued);
    {
        tsan::as engine(w.reader);
        tsan::acquire(&w.proxy);
        tsan::reads(copy.from, copy.bytes);
        tsan::release(&w.read_groups[copy.thread][copy.group % 8]);
        tsan::release(&w.gang->end);
    }
    tsan::as engine(w.writer);
    tsan::acquire(&w.issued);
    if (copy.part.of.rank) each_row(copy.part, false, [](char *row, size_t bytes) { tsan::writes(row, bytes); });
    else tsan::writes(copy.to, copy.bytes);
    tsan::release(&w.written_groups[copy.thread][copy.group % 8]);
    tsan::release(w.grid);
}

static void write(const bulk_out &copy) {
    if (copy.written) return;
    if (copy.part.of.rank) move_tile(copy.part, (char *)copy.from, false);
    else memcpy(copy.to, copy.read.empty() ? copy.from : copy.read.data(), copy.bytes);
}

static void store(worker &w, const bulk_out &copy) {
    see_store(w, copy);
    tsan::hide_accesses own;
    w.stores.push_back(copy);
    if (!seed.once_in(3)) return;
    write(copy);
    w.stores.back().written = true;
}

static void load(worker &w, const char *name, const bulk_in &copy, bool near) {
    uint64_t *const barrier = copy.barrier;
    check_barrier(w, name, near, barrier);
    read(w, name, barrier, __atomic_load_n(barrier, __ATOMIC_ACQUIRE));
    const int rank = owner(w, barrier), to_rank = owner(w, copy.to);
    if (rank >= 0 && to_rank >= 0 && rank != to_rank) fail_at(w, barrier, name, " is not where the copy goes");
    see_load(w, copy);
    tsan::hide_accesses own;
    const bool near_barrier = rank < 0 || rank == w.rank;
    if (hostile ? seed.draw(2) == 0 : !near_barrier) { // outside adversary mode another OS thread may be polling
        finish(w, copy);
    } else {
        worker &waits = near_barrier ? w : *w.gang->seats[rank].runs;
        waits.loads.push_back(copy);
        waits.loads.back().remote = !near_barrier;
    }
}

void bulk_load(void *to, const void *from, unsigned bytes, uint64_t *barrier, bool near) {
    check_bytes(*self, to, from, bytes, to);
    load(*self, "cp_async_bulk", {to, from, bytes, barrier, {}}, near);
}

void bulk_store(void *to, const void *from, unsigned bytes) {
    worker &w = *self;
    check_bytes(w, to, from, bytes, from);
    store(w, {to, from, bytes, w.groups[thread_index] + 1, thread_index, {}});
}

// The box at `at` of the tensor that the map is of, which is read here and now, and how many bytes it has.
static tile find_tile(const void *map, int rank, const int32_t *at, unsigned *bytes) {
    const char *const name = "cp_async_bulk_tensor";
    if ((uintptr_t)map % 64) fail("%s: the tensor map at %p is not aligned to 64 bytes", name, map);
    tile t{};
    memcpy(&t.of, map, sizeof t.of);
    if (t.of.mark != tensor_mark) fail("%s: there is no tensor map at %p", name, map);
    if (t.of.rank != (uint32_t)rank) fail("%s: %d coordinates in a tensor of %u dimensions", name, rank, t.of.rank);
    for (int i = 0; i < rank; i++) t.at[i] = at[i];
    *bytes = t.of.box[0] * t.of.box[1] * t.of.element_bytes;
    return t;
}

static void check_tile(const worker &w, const tile &t, const void *to, const void *from, unsigned bytes,
                       const void *shared) {
    const char *const name = "cp_async_bulk_tensor";
    const tensor &of = t.of;
    const bool load = shared == to;
    if ((uintptr_t)shared % 128)
        fail("%s of %u bytes from %p to %p: not aligned to 128 bytes in shared memory", name, bytes, from, to);
    if (t.at[0] * (int64_t)of.element_bytes % 16) // an illegal instruction on an H200, as is the next
        fail("%s: column %d is no multiple of 16 bytes", name, t.at[0]);
    if (!load && (t.at[0] < 0 || t.at[1] < 0))
        fail("%s to %d, %d: a store begins inside or behind its tensor", name, t.at[0], t.at[1]);
    if (of.swizzled && of.box[0] * of.element_bytes != 128) // where narrower rows come to lie is written nowhere
        fail("%s of rows of %u bytes, with a swizzle of 128", name, of.box[0] * of.element_bytes);
    check_bulk(w, name, to, from, bytes, shared);
    check_memory(shared, bytes);
#ifdef __SANITIZE_ADDRESS__
    each_row(t, load, [](char *row, size_t bytes) { check_memory(row, bytes); });
#endif
}

void tensor_load(void *to, const void *map, int rank, const int32_t *at, uint64_t *barrier, bool near) {
    unsigned bytes;
    const tile t = find_tile(map, rank, at, &bytes);
    check_tile(*self, t, to, t.of.base, bytes, to);
    load(*self, "cp_async_bulk_tensor", {to, t.of.base, bytes, barrier, t}, near);
}

void tensor_store(const void *map, int rank, const int32_t *at, const void *from) {
    worker &w = *self;
    unsigned bytes;
    const tile t = find_tile(map, rank, at, &bytes);
    check_tile(w, t, t.of.base, from, bytes, from);
    store(w, {t.of.base, from, bytes, w.groups[thread_index] + 1, thread_index, t});
}

void bulk_commit() { self->groups[thread_index]++; }

void bulk_wait(int groups, bool only_read) {
    worker &w = *self;
    const unsigned last = w.groups[thread_index] - (unsigned)groups; // these are done, and those before
    for (unsigned g = last - 7; tsan::on && g != last + 1; g++) {
        tsan::acquire(&w.read_groups[thread_index][g % 8]);
        if (!only_read) tsan::acquire(&w.written_groups[thread_index][g % 8]);
    }
    tsan::hide_accesses seen_at_issue;
    size_t left = 0;
    for (bulk_out &copy : w.stores) {
        const bool done = copy.thread == thread_index && (int)(w.groups[thread_index] - copy.group) >= groups;
        if (done && only_read && hostile && !copy.part.of.rank && !copy.written && copy.read.empty())
            copy.read.assign((const char *)copy.from, (const char *)copy.from + copy.bytes);
        if (done && (!only_read || copy.read.empty())) write(copy);
        else if (left++ != (size_t)(&copy - w.stores.data())) w.stores[left - 1] = copy;
    }
    w.stores.resize(left, bulk_out{});
    if (self) interleave(w);
}

// Executes the calling thread's wgmma of all batches up to `batch`.
static void multiply(worker &w, unsigned batch) {
    size_t left = 0;
    for (size_t i = 0; i < w.products.size(); i++) {
        product &p = w.products[i];
        if (p.thread == thread_index && (int)(batch - p.batch) >= 0) p.multiply();
        else if (left++ != i) w.products[left - 1] = std::move(p);
    }
    w.products.resize(left);
}

void wgmma(std::function<void()> what) {
    worker &w = *self;
    const unsigned batch = w.batches[thread_index] + 1;
    w.products.push_back({thread_index, batch, std::move(what)});
    if (seed.draw(3) == 0) multiply(w, batch);
}

// The lanes of a warp issue a wgmma together, so they meet here.
void wgmma_commit() {
    self->batches[thread_index]++;
    meet(op::syncwarp, ~0u, 0, 0);
}

void wgmma_wait(int batches) {
    worker &w = *self;
    multiply(w, w.batches[thread_index] - (unsigned)batches);
    meet(op::syncwarp, ~0u, 0, 0);
}

void store_async(void *to, const void *value, unsigned bytes, uint64_t *barrier) {
    const worker &w = *self;
    if ((uintptr_t)to % bytes) fail("st_async of %u bytes to %p, which is not aligned to that", bytes, to);
    check_there(w, "st_async", owner(w, to));
    check_barrier(w, "st_async", false, barrier);
    if (owner(w, to) != owner(w, barrier)) fail_at(w, barrier, "st_async", " is not where the value goes");
    bulk_in copy = {to, nullptr, bytes, barrier, {}};
    memcpy(copy.value, value, bytes);
    see_load(*self, copy);
    if (hostile && seed.draw(2)) {
        const int rank = owner(w, barrier);
        copy.remote = rank >= 0 && rank != w.rank;
        (copy.remote ? w.gang->seats[rank].runs : self)->loads.push_back(copy);
        return;
    }
    finish(w, copy);
}

// ---------------------------------------------------------------------------------------------------------------------
// Blocks.

static void forbid([[maybe_unused]] char *memory, [[maybe_unused]] size_t bytes, [[maybe_unused]] bool forbidden) {
#ifdef __SANITIZE_ADDRESS__
    if (forbidden) __asan_poison_memory_region(memory, bytes);
    else __asan_unpoison_memory_region(memory, bytes);
#endif
}

// What the last thread to return leaves to do. The rest of its cluster finds its shared memory poisoned.
static void finish_block(worker &w) {
    if (hostile) {
        for (const bulk_in &copy : w.loads)
            if (copy.remote) finish(w, copy);
        const auto remote = [](const bulk_in &copy) { return copy.remote; };
        w.loads.erase(std::remove_if(w.loads.begin(), w.loads.end(), remote), w.loads.end());
        for (const bulk_out &copy : w.stores)
            if (!copy.read.empty()) write(copy); // the grid's end completes it
        const auto read = [](const bulk_out &copy) { return !copy.read.empty(); };
        w.stores.erase(std::remove_if(w.stores.begin(), w.stores.end(), read), w.stores.end());
    }
    if (!w.loads.empty())
        fail("it returned, and nobody had waited for the bulk copy of %u bytes to %p", w.loads[0].bytes, w.loads[0].to);
    if (!w.stores.empty())
        fail("thread %d returned, and had not waited for its bulk copy of %u bytes to %p", w.stores[0].thread,
             w.stores[0].bytes, w.stores[0].to);
    if (w.gang->blocks == 1) return;
    w.gang->seats[w.rank].idle_at.store(returned, std::memory_order_release);
    if (w.grid->shared) memset(w.shared, 0xff, w.grid->shared);
    forbid(w.shared, w.grid->shared, true);
}

// Puts into memory the contents that the grid's threads may see before they wait for the predecessor (hidden), or the
// present contents.
static void hide(job &j, bool hidden) {
    if (!j.unseen || j.hidden == hidden) return;
    j.hidden = hidden;
    if (hidden) for (auto o = j.unseen->rbegin(); o != j.unseen->rend(); ++o) o->exchange();
    else for (auto &o : *j.unseen) o.exchange();
}

// The number of the next cluster of the grid for these OS threads. ThreadSanitizer sees no races between blocks on one
// OS thread, since they share their shared memory; so the OS threads take turns, and neighbours are on different ones.
static unsigned long long next_unit(job &j, cluster &c, int number) {
    if (!fixed_order) return j.next_unit.fetch_add(1, std::memory_order_relaxed);
    const int each = j.cluster_blocks, clusters = j.workers / each;
    unsigned long long unit = c.taken++ * clusters + (unsigned)(number / each + j.shift) % clusters;
    if (j.unseen) { // one cluster at a time; each begins with the old contents
        unit = number < each ? c.taken - 1 : j.units;
        hide(j, unit < j.units);
    }
    if (!hostile || unit >= j.units) return unit;
    return (unit * j.unit_step + j.first_unit) % j.units; // in the seed's order
}

static char os_thread_begun; // for ThreadSanitizer: its thread_local variables, __shared__ ones among them, are there

// The number of the next cluster, which the last of its blocks to be ready takes for all.
static unsigned long long next_cluster(worker &w) {
    job &j = *w.grid;
    cluster &c = *w.gang;
    if (c.blocks == 1) return next_unit(j, c, w.number);
    const unsigned round = c.rounds.load(std::memory_order_relaxed);
    if (c.ready.fetch_add(1, std::memory_order_acq_rel) + 1 < (unsigned)c.blocks) {
        for (int naps = 0; c.rounds.load(std::memory_order_acquire) == round;) {
            if (j.failed.load(std::memory_order_relaxed)) return j.units;
            nap(w, naps++);
        }
        return c.number;
    }
    c.ready.store(0, std::memory_order_relaxed);
    c.arrived.store(0, std::memory_order_relaxed);
    for (int i = 0; i < c.blocks; i++) {
        c.seats[i].idle_at.store(busy, std::memory_order_relaxed);
        forbid(c.seats[i].shared, c.shared_bytes, false);
    }
    c.number = next_unit(j, c, w.number);
    c.rounds.store(round + 1, std::memory_order_release);
    return c.number;
}

// Takes the grid's next block, if there is one.
static bool start_block(worker &w) {
    job &j = *w.grid;
    if (j.failed.load(std::memory_order_relaxed)) return false;
    tsan::hide_accesses own;
    tsan::acquire(&os_thread_begun);
    tsan::acquire(&w.gang->end);
    finish_block(w);
    const unsigned long long unit = next_cluster(w);
    if (unit >= j.units) return false;
    tsan::acquire(&w.gang->end); // of the other blocks
    w.current->spent = false;
    while (w.spent) { // their threads are ordered before the next ones
        fiber *const f = w.spent;
        w.spent = f->next_free;
        f->spent = false;
        f->next_free = w.free;
        w.free = f;
    }
    const unsigned long long row = unit / j.clusters.x;
    blockIdx = {(unsigned)(unit % j.clusters.x) * j.cluster_size.x + w.place.x,
                (unsigned)(row % j.clusters.y) * j.cluster_size.y + w.place.y,
                (unsigned)(row / j.clusters.y) * j.cluster_size.z + w.place.z};
    w.live = w.threads = (int)(j.block.x * j.block.y * j.block.z);
    w.started = 0;
    w.next_index = {0, 0, 0};
    if (hostile) {
        w.first_thread = (int)seed.draw((unsigned)w.threads);
        do w.next_step = 1 + (int)seed.draw((unsigned)w.threads);
        while (std::gcd(w.next_step, w.threads) != 1);
        w.slow_warp = (int)seed.draw(2 * max_warps);
        w.starts_first = seed.draw(2) != 0;
    }
    w.poisoned.clear();
    const int warps = (w.threads + 31) / 32;
    memset(w.gone, 0, warps * sizeof w.gone[0]);
    if (w.threads % 32) w.gone[warps - 1] = ~0u << w.threads % 32;
    if (j.shared && w.gang->blocks == 1) memset(w.shared, 0xff, j.shared);
    reset_waits(w);
    tsan::release(&w.gang->start);
    return true;
}

// Runs the block's next thread, on the fiber this is called on.
static void run_thread(worker &w) {
    const int order = w.started++;
    const int index = hostile ? (int)((w.first_thread + (long long)order * w.next_step) % w.threads) : order;
    if (hostile) w.next_index = {index % blockDim.x, index / blockDim.x % blockDim.y, index / blockDim.x / blockDim.y};
    thread_index = index;
    threadIdx = w.next_index;
    if (++w.next_index.x == blockDim.x) {
        w.next_index.x = 0;
        if (++w.next_index.y == blockDim.y) w.next_index.y = 0, w.next_index.z++;
    }
    w.fenced[index] = false;
    w.atomic_count[index] = 0;
    tsan::acquire(&w.gang->start);
    tsan::acquire(w.grid->body);
    (*w.grid->body)();
    tsan::release(w.grid);
    tsan::release(&w.gang->end);
    check_stack(w);
    for (const product &p : w.products)
        if (p.thread == index) fail("thread %d returned, and had not waited for its wgmma", index);
    w.live--;
    w.gone[index / 32] |= 1u << index % 32;
    for (int i = w.meetings[index / 32]; i-- > 0;) finish_meeting(w, index / 32, i); // someone may have waited for it
}

// What every fiber does: first threads that may go on, then those that wait for their start, then the next block.
static void run_threads() {
    worker &w = *self;
    arrived(w, nullptr);
    for (;;) {
        if (w.ready_count && !w.start_first) {
            fiber *next = w.waits[pop_ready(w)].on;
            put_back(w);
            switch_to(w, next);
        } else if (w.started < w.threads && w.current->spent) {
            put_back(w);
            switch_to(w, take_free_fiber(w));
        } else if (w.started < w.threads) {
            w.start_first = false;
            run_thread(w);
            w.current->spent = tsan::on;
        } else if (w.live > 0) {
            wait_for_cluster(w);
        } else if (!start_block(w)) {
            put_back(w);
            switch_to(w, &w.home);
        }
    }
}

// Runs blocks of the grid until none is left to take, as the job's worker of this number. The state of it lives as long
// as the OS thread: fibers stay on it.
static void run_blocks(job &j, int number) {
    static thread_local std::unique_ptr<worker> owner;
    if (!owner) owner = std::make_unique<worker>();
    worker &w = *owner;
    self = &w;
    w.grid = &j;
    blockDim = j.block;
    gridDim = j.grid;
    if (w.shared_bytes != j.shared) { // exactly as large as asked for, so that a sanitizer sees an overrun
        ::free(w.shared);
        w.shared = nullptr;
        w.shared_bytes = 0;
        if (j.shared && posix_memalign((void **)&w.shared, 1024, j.shared)) abort();
        w.shared_bytes = j.shared;
    }
    dynamic_shared = w.shared;
    const int rank = number % j.cluster_blocks;
    const dim3 size = j.cluster_size;
    w.gang = j.gangs ? &j.gangs[number / j.cluster_blocks] : &w.alone;
    w.gang->taken = 0;
    w.number = number;
    w.home.seen_as = tsan::current();
    w.gang->seats[rank].shared = w.shared;
    w.gang->seats[rank].runs = &w;
    w.rank = rank;
    w.place = {rank % size.x, rank / size.x % size.y, rank / size.x / size.y};
    w.threads = w.started = w.live = 0;
    if (hostile) j.turn->wait(number);
    switch_to(w, take_free_fiber(w));
    if (w.abandoned) {
        const auto give_up = [&](tsan::context c) { // what this one did is over
            if (!c) return;
            tsan::as given_up(c);
            tsan::release(&j);
            tsan::release(&w.gang->end);
        };
        for (const auto &f : w.fibers) give_up(f->seen_as);
        for (const tsan::context engine : {w.loader, w.reader, w.writer}) give_up(engine);
        w.free = w.spent = nullptr;
        for (size_t i = 0; i < w.fibers.size(); i++) reset_fiber(w, w.fibers[i].get(), (int)i + 1);
        std::fill(w.meetings, w.meetings + max_warps, 0);
        w.ready_head = w.ready_count = 0;
        w.barrier_arrived = w.barrier_votes = 0;
        w.start_first = w.abandoned = false;
        w.cluster_arrived = w.parked_count = 0;
    }
    w.loads.clear(); // left by a grid that failed in another block
    w.stores.clear();
    w.products.clear();
    if (hostile) j.turn->pass(seed, number, true);
    if (w.gang != &w.alone) forbid(w.shared, j.shared, false);
    w.gang = &w.alone;
    self = nullptr;
}

// The OS threads that help the launching one. They are never joined: at exit they sleep.
struct pool {
    std::mutex launching; // held by the one launch that runs
    std::mutex lock;      // over what follows
    std::condition_variable wake, wake_more, idle; // the second for the threads beyond `size`, which clusters need
    job *grid = nullptr;
    unsigned long long launches = 0;
    int size = 1, started = 1;  // the launching thread is one of them
    int inside = 0, joined = 0; // helpers that work on the grid; that ever did

    pool() {
        const char *wanted = getenv("BOOKENDS_CPU_THREADS");
        size = wanted ? atoi(wanted) : fixed_order ? 2 : (int)std::thread::hardware_concurrency();
        size = std::max(1, std::min(size, 1024));
    }
    void help(int number) {
        tsan::release(&os_thread_begun);
        tsan::hide_sync of_the_pool;
        std::unique_lock<std::mutex> guard(lock);
        std::condition_variable &mine = number < size ? wake : wake_more;
        for (unsigned long long seen = 0;;) {
            mine.wait(guard, [&] { return launches != seen; });
            seen = launches;
            if (!grid || number >= grid->workers) continue; // too late for this one, or not needed
            job &j = *grid;
            inside++;
            joined++;
            guard.unlock();
            run_blocks(j, number);
            guard.lock();
            if (--inside == 0) idle.notify_one();
        }
    }
    // Has so many OS threads, or fewer where the system gives no more.
    void start(int wanted) {
        try {
            for (; started < wanted; started++) std::thread([this, number = started] { help(number); }).detach();
        } catch (const std::system_error &) {
            std::lock_guard<std::mutex> guard(lock);
            size = std::min(size, started);
        }
    }
    void run(job &j) {
        tsan::hide_sync of_the_pool;
        std::lock_guard<std::mutex> alone(launching);
        const int each = j.cluster_blocks, most = std::max(1, size / each);
        const int gangs = fixed_order ? most : (int)std::min<unsigned long long>(most, j.units);
                if (gangs * each > 1) start(each == 1 ? size : gangs * each);
        j.workers = std::min(gangs, started / each) * each;
        if (j.workers == 0) {
            j.failed = true;
            j.message = "kernel " + kernel_name(j.kernel) + ": not enough OS threads for the blocks of a cluster";
            return;
        }
        if (each > 1) {
            j.gangs = std::make_unique<cluster[]>((size_t)(j.workers / each));
            for (int i = 0; i < j.workers / each; i++) j.gangs[i].blocks = each, j.gangs[i].shared_bytes = j.shared;
        }
        // A gang must be whole; else a single helper may be late.
        const bool all = j.workers > 1 && (each > 1 || fixed_order);
        if (hostile) {
            seed.next_grid();
            j.turn = std::make_unique<turns>(j.workers);
            j.first_unit = seed.draw((unsigned)std::min<unsigned long long>(j.units, UINT32_MAX));
            do j.unit_step = 1 + seed.draw((unsigned)std::min<unsigned long long>(j.units, UINT32_MAX));
            while (std::gcd(j.unit_step, j.units) != 1);
        }
        if (j.workers > 1) {
            std::lock_guard<std::mutex> guard(lock);
            grid = &j;
            joined = 0;
            launches++;
            wake.notify_all();
            if (j.workers > size) wake_more.notify_all();
        }
        run_blocks(j, 0);
        std::unique_lock<std::mutex> guard(lock);
        if (!all) grid = nullptr;
        idle.wait(guard, [&] { return inside == 0 && (!all || joined == j.workers - 1); });
        grid = nullptr;
    }
};

static pool &the_pool() {
    static pool *p = new pool; // never destroyed: its threads outlive main
    return *p;
}

// ---------------------------------------------------------------------------------------------------------------------
// Errors.

static thread_local cudaError_t last_error = cudaSuccess; // as in CUDA: per host thread, until cudaGetLastError
static std::atomic<bool> broken{false};                   // a kernel has failed
static std::mutex broken_lock;
static char broken_message[1024];

// Every call returns through here.
static cudaError_t done(cudaError_t error) {
    if (broken) return cudaErrorLaunchFailure;
    if (error != cudaSuccess) last_error = error;
    return error;
}

} // namespace cpu

using namespace cpu;

const char *cudaGetErrorString(cudaError_t error) {
    if (error == cudaErrorLaunchFailure && broken) return broken_message;
    switch (error) {
#define E(name, number, words)                                                                                         \
    case name: return words;
        CPU_ERRORS(E)
#undef E
    }
    return "unrecognized error code";
}

const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
#define E(name, number, words)                                                                                         \
    case name: return #name;
        CPU_ERRORS(E)
#undef E
    }
    return "unrecognized error code";
}

cudaError_t cudaPeekAtLastError() { return broken ? cudaErrorLaunchFailure : last_error; }

cudaError_t cudaGetLastError() {
    const cudaError_t error = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return error;
}

// ---------------------------------------------------------------------------------------------------------------------
// Streams, events, graphs.

// An operation in a stream's queue. early: a kernel that may start before its predecessor ends.
struct operation {
    std::function<void()> work;
    bool early = false;
};

// An event's latest record. Waits share it, so that it outlives the event.
struct record {
    bool reached = false;
    std::chrono::steady_clock::time_point when;
};

struct CUstream_st {
    bool blocking;        // with the legacy default stream
    CUgraph_st *capture;  // what it is captured into, or null
    unsigned steps;       // so many things were captured from it
    bool joined;          // another stream of the capture has waited for all of them

    // For ThreadSanitizer a stream is a thread that starts one operation after the other, and another that sees them
    // completed. The kernels from first_pending to pending have let the next one start early.
    int number = 0;
    tsan::context seen_as{}, completion{};
    char asked = 0, ran = 0, done = 0, ends[16]{};
    unsigned first_pending = 0, pending = 0;

    // Adversary mode: operations not yet executed, and the memory contents that an early kernel sees.
    std::deque<operation> queue{};
    std::vector<old_contents> unseen{};
};

struct CUevent_st {
    bool timed, recorded;
    std::shared_ptr<record> latest;
    CUstream_st *in; // the stream of that record
    unsigned long long capture; // if last recorded while capturing: the capture, the stream, and its steps until then
    CUstream_st *from;
    unsigned steps;
};

struct CUgraph_st {
    unsigned long long id;
    CUstream_st *origin;
    cudaStreamCaptureMode mode;
    std::thread::id owner;
    bool valid = true;
    std::vector<CUstream_st *> streams;
    std::vector<operation> work;
};

struct CUgraphExec_st {
    std::vector<operation> work;
};

static std::mutex streams_lock;           // over all that streams, events and captures hold
static std::vector<CUgraph_st *> captures; // those under way

// Holds a lock, which orders nothing that CUDA orders.
template <class mutex> struct locked_as {
    mutex &lock;
    explicit locked_as(mutex &held) : lock(held) {
        tsan::hide_sync of_the_device;
        lock.lock();
    }
    ~locked_as() {
        tsan::hide_sync of_the_device;
        lock.unlock();
    }
};
using locked = locked_as<std::mutex>;

// The error of doing what captures forbid, which spoils them, or success where none is under way that minds.
static cudaError_t refuse_while_capturing() {
    locked guard(streams_lock);
    for (CUgraph_st *g : captures) {
        if (g->mode == cudaStreamCaptureModeRelaxed) continue;
        if (g->mode == cudaStreamCaptureModeThreadLocal && g->owner != std::this_thread::get_id()) continue;
        g->valid = false;
        return cudaErrorStreamCaptureUnsupported;
    }
    return cudaSuccess;
}

// Work on the legacy stream would wait for every blocking stream.
static cudaError_t refuse_legacy_stream() {
    for (CUgraph_st *g : captures) {
        if (!g->origin->blocking) continue;
        g->valid = false;
        return cudaErrorStreamCaptureImplicit;
    }
    return cudaSuccess;
}

static CUstream_st legacy{true, nullptr, 0, false}; // the default stream
static char all_done, all_blocking_done;             // what any stream, or any blocking stream, has done
static thread_local CUstream_st *running = nullptr;  // the stream that this host thread does something for

// For ThreadSanitizer, what follows in this stream comes after all that precedes.
static void settle(CUstream_st &s) {
    for (; tsan::on && s.first_pending != s.pending; s.first_pending++) tsan::acquire(&s.ends[s.first_pending % 16]);
}

// For ThreadSanitizer, the host thread comes after all that the stream has done.
static void seen_done(cudaStream_t stream) { tsan::acquire(&(stream ? stream : &legacy)->done); }

// Does the work as the stream's. To ThreadSanitizer a stream is one thread, so it must not do two things at once.
static std::recursive_mutex running_lock;
using alone = std::unique_ptr<locked_as<std::recursive_mutex>>;
static alone run_alone() { return alone(watched ? new locked_as<std::recursive_mutex>(running_lock) : nullptr); }

static void run_on(CUstream_st &s, const std::function<void()> &work) {
    const alone lock = run_alone();
    if (tsan::on && !s.seen_as) s.seen_as = tsan::create(), s.completion = tsan::create();
    CUstream_st *const outer = running;
    running = &s;
    tsan::release(&s.asked);
    {
        tsan::as the_stream(s.seen_as);
        tsan::acquire(&s.asked);
        if (s.blocking) tsan::acquire(&s == &legacy ? &all_blocking_done : &legacy.done);
        work();
        tsan::release(&s.ran);
    }
    if (tsan::on) {
        tsan::as what_is_done(s.completion);
        tsan::acquire(&s.ran);
        for (unsigned i = s.first_pending; i != s.pending; i++) tsan::acquire(&s.ends[i % 16]);
        tsan::release(&s.done);
        tsan::release(&all_done);
        if (s.blocking) tsan::release(&all_blocking_done);
    }
    if (&s == &legacy) seen_done(nullptr); // programs for a CPU, whose memory is the host's, may take it for done
    running = outer;
}

// In adversary mode a stream executes its queue late: at a wait for it, or when the seed chooses. The next operation in
// the queue shows whether a kernel has a dependent that starts early.
static std::vector<CUstream_st *> all_streams; // with queues
static bool dependent_is_next = false;

static void run_next(CUstream_st &s) {
    const operation next = std::move(s.queue.front());
    s.queue.pop_front();
    const bool outer = dependent_is_next;
    dependent_is_next = !s.queue.empty() && s.queue.front().early;
    run_on(s, next.work);
    dependent_is_next = outer;
}

static void drain(cudaStream_t stream, size_t but = 0) {
    if (!hostile || !stream) return;
    const alone lock = run_alone();
    while (stream->queue.size() > but) run_next(*stream);
}

static void drain_all(bool only_blocking = false) {
    if (!hostile) return;
    const alone lock = run_alone();
    std::vector<CUstream_st *> streams = all_streams;
    while (!streams.empty()) {
        const size_t i = seed.draw((unsigned)streams.size());
        if (streams[i]->blocking || !only_blocking) drain(streams[i]);
        streams.erase(streams.begin() + (ptrdiff_t)i);
    }
}

// Executes the stream up to this record.
static void reach(record &latest, cudaStream_t in) {
    const alone lock = run_alone();
    while (!latest.reached) run_next(*in);
    tsan::acquire(&latest);
}

static void run_or_queue(cudaStream_t stream, operation &&what) {
    const alone lock = run_alone();
    if (!hostile || !stream) {
        drain_all(true); // the default stream waits for the blocking ones
        return run_on(stream ? *stream : legacy, what.work);
    }
    stream->queue.push_back(std::move(what));
    if (seed.draw(2) == 0) drain(stream, 1);
}

// Does the work, or captures it.
static cudaError_t enqueue(cudaStream_t stream, std::function<void()> work, bool early = false) {
    tsan::hide_accesses when_the_work_is_freed; // the stream has read it
    if (broken) return cudaErrorLaunchFailure;
    {
        locked guard(streams_lock);
        if (!stream) {
            if (cudaError_t error = refuse_legacy_stream()) return error;
        } else if (stream->capture) {
            if (!stream->capture->valid) return cudaErrorStreamCaptureInvalidated;
            stream->capture->work.push_back({std::move(work), early});
            stream->steps++;
            stream->joined = false;
            return cudaSuccess;
        }
    }
    run_or_queue(stream, {std::move(work), early});
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    if (!stream || flags > cudaStreamNonBlocking) return done(cudaErrorInvalidValue);
    static std::atomic<int> streams{0};
    *stream = new CUstream_st{flags == cudaStreamDefault, nullptr, 0, false};
    (*stream)->number = ++streams;
    if (hostile) {
        const alone lock = run_alone();
        all_streams.push_back(*stream);
    }
    return done(cudaSuccess);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int) {
    return cudaStreamCreateWithFlags(stream, flags); // one after the other in any case
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = 0;
    return done(cudaSuccess);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (!stream) return done(cudaErrorInvalidResourceHandle);
    {
        locked guard(streams_lock);
        if (CUgraph_st *g = stream->capture) {
            g->streams.erase(std::find(g->streams.begin(), g->streams.end(), stream));
            g->valid = false;
            if (g->origin == stream) { // nobody can end it now
                for (CUstream_st *s : g->streams) s->capture = nullptr;
                captures.erase(std::find(captures.begin(), captures.end(), g));
                delete g;
            }
        }
    }
    drain(stream);
    if (hostile) {
        const alone lock = run_alone();
        all_streams.erase(std::find(all_streams.begin(), all_streams.end(), stream));
    }
    tsan::destroy(stream->seen_as);
    tsan::destroy(stream->completion);
    delete stream;
    return done(cudaSuccess);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    locked guard(streams_lock);
    if (!stream) drain_all(true);
    else if (!stream->capture) drain(stream);
    if (!stream || !stream->capture) seen_done(stream);
    if (!stream) return done(refuse_legacy_stream());
    if (!stream->capture) return done(cudaSuccess);
    stream->capture->valid = false;
    return done(cudaErrorStreamCaptureUnsupported);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }

cudaError_t cudaDeviceSynchronize() {
    drain_all();
    tsan::acquire(&all_done);
    return done(refuse_while_capturing());
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    if (!event) return done(cudaErrorInvalidValue);
    *event = new CUevent_st{!(flags & cudaEventDisableTiming), false, {}, nullptr, 0, nullptr, 0};
    return done(cudaSuccess);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    if (!event) return done(cudaErrorInvalidResourceHandle);
    delete event;
    return done(cudaSuccess);
}

// As in CUDA, an event recorded in a capture only orders the captured streams: it has no time and cannot be waited for.
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (!event) return done(cudaErrorInvalidResourceHandle);
    locked guard(streams_lock);
    if (stream && stream->capture) {
        if (!stream->capture->valid) return done(cudaErrorStreamCaptureInvalidated);
        event->capture = stream->capture->id;
        event->from = stream;
        event->steps = stream->steps;
        return done(cudaSuccess);
    }
    if (!stream)
        if (cudaError_t error = refuse_legacy_stream()) return done(error);
    event->capture = 0;
    event->recorded = true;
    event->in = stream;
    event->latest = std::make_shared<record>();
    run_or_queue(stream, {[latest = event->latest] {
        settle(*running);
        tsan::release(latest.get());
        latest->when = std::chrono::steady_clock::now();
        latest->reached = true;
    }});
    return done(cudaSuccess);
}

// A stream that waits for an event of a capture joins that capture.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    if (!event) return done(cudaErrorInvalidResourceHandle);
    locked guard(streams_lock);
    if (!event->capture && event->recorded && (!stream || !stream->capture))
        run_or_queue(stream, {[latest = event->latest, in = event->in] { reach(*latest, in); }});
    if (!event->capture) return done(cudaSuccess);
    for (CUgraph_st *g : captures) {
        if (g->id != event->capture) continue;
        if (!stream) return done(refuse_legacy_stream());
        if (stream->capture && stream->capture != g) {
            g->valid = stream->capture->valid = false;
            return done(cudaErrorStreamCaptureMerge);
        }
        if (!stream->capture) {
            stream->capture = g;
            g->streams.push_back(stream);
        }
        stream->steps++;
        stream->joined = false;
        if (event->from != stream && event->from->steps == event->steps) event->from->joined = true;
        return done(cudaSuccess);
    }
    return done(cudaErrorCapturedEvent); // its capture is over
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (!event) return done(cudaErrorInvalidResourceHandle);
    locked guard(streams_lock);
    if (!event->capture && event->recorded) reach(*event->latest, event->in);
    return done(event->capture ? cudaErrorCapturedEvent : cudaSuccess);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaEventQuery(event); }

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t stop) {
    if (!ms) return done(cudaErrorInvalidValue);
    if (!start || !stop) return done(cudaErrorInvalidResourceHandle);
    locked guard(streams_lock);
    if (start->capture || stop->capture) return done(cudaErrorCapturedEvent);
    if (!start->timed || !stop->timed) return done(cudaErrorInvalidResourceHandle);
    if (!start->recorded || !stop->recorded) return done(cudaErrorInvalidResourceHandle);
    reach(*start->latest, start->in);
    reach(*stop->latest, stop->in);
    *ms = std::chrono::duration<float, std::milli>(stop->latest->when - start->latest->when).count();
    return done(cudaSuccess);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    static unsigned long long ids = 0;
    if (!stream) return done(cudaErrorStreamCaptureUnsupported);
    drain(stream);
    locked guard(streams_lock);
    if (stream->capture) {
        stream->capture->valid = false;
        return done(cudaErrorStreamCaptureUnsupported);
    }
    CUgraph_st *g = new CUgraph_st;
    g->id = ++ids;
    g->origin = stream;
    g->mode = mode;
    g->owner = std::this_thread::get_id();
    g->streams = {stream};
    captures.push_back(g);
    stream->capture = g;
    return done(cudaSuccess);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    if (!stream || !graph) return done(cudaErrorInvalidValue);
    locked guard(streams_lock);
    CUgraph_st *g = stream->capture;
    *graph = nullptr;
    if (!g) return done(cudaErrorIllegalState);
    if (g->origin != stream) {
        g->valid = false;
        return done(cudaErrorStreamCaptureUnmatched);
    }
    bool joined = true;
    for (CUstream_st *s : g->streams) {
        s->capture = nullptr;
        joined &= s == stream || s->joined;
    }
    captures.erase(std::find(captures.begin(), captures.end(), g));
    if (g->valid && joined) {
        *graph = g;
        return done(cudaSuccess);
    }
    const cudaError_t error = g->valid ? cudaErrorStreamCaptureUnjoined : cudaErrorStreamCaptureInvalidated;
    delete g;
    return done(error);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    if (!status) return done(cudaErrorInvalidValue);
    locked guard(streams_lock);
    if (!stream || !stream->capture) *status = cudaStreamCaptureStatusNone;
    else *status = stream->capture->valid ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusInvalidated;
    return done(cudaSuccess);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long) {
    if (!exec || !graph) return done(cudaErrorInvalidValue);
    *exec = new CUgraphExec_st{graph->work};
    return done(cudaSuccess);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    if (!exec) return done(cudaErrorInvalidValue);
    for (const operation &step : exec->work)
        if (cudaError_t error = enqueue(stream, step.work, step.early)) return done(error);
    return done(cudaSuccess);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    tsan::hide_accesses streams_have_read_it;
    delete graph;
    return done(graph ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    tsan::hide_accesses streams_have_read_it;
    delete exec;
    return done(exec ? cudaSuccess : cudaErrorInvalidValue);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launches.

// What cudaFuncSetAttribute has set.
struct kernel_attributes {
    size_t shared = shared_default; // dynamic, at most
    bool large_clusters = false;
};
static std::mutex attributes_lock;
static std::map<const void *, kernel_attributes> attributes_set;

static kernel_attributes attributes_of(const void *kernel) {
    locked guard(attributes_lock);
    const auto set = attributes_set.find(kernel);
    return set == attributes_set.end() ? kernel_attributes{} : set->second;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value) {
    if (!kernel) return done(cudaErrorInvalidDeviceFunction);
    const bool shared = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (shared && (value < 0 || (size_t)value > shared_most)) return done(cudaErrorInvalidValue);
    locked guard(attributes_lock);
    if (shared) attributes_set[kernel].shared = (size_t)value;
    if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) attributes_set[kernel].large_clusters = value != 0;
    return done(cudaSuccess);
}

cudaError_t cudaDeviceReset() {
    {
        locked guard(attributes_lock);
        attributes_set.clear();
    }
    std::lock_guard<std::mutex> guard(broken_lock);
    broken = false;
    last_error = cudaSuccess;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *kernel) {
    if (!attributes) return done(cudaErrorInvalidValue);
    if (!kernel) return done(cudaErrorInvalidDeviceFunction);
    const kernel_attributes set = attributes_of(kernel);
    cudaFuncAttributes a{};
    a.maxThreadsPerBlock = max_threads;
    a.numRegs = 32; // the most that 65536 registers leave two blocks of 1024 threads
    a.ptxVersion = a.binaryVersion = 90;
    a.maxDynamicSharedSizeBytes = (int)set.shared;
    a.preferredShmemCarveout = -1;
    a.nonPortableClusterSizeAllowed = set.large_clusters;
    *attributes = a;
    return done(cudaSuccess);
}

// The blocks of a cluster in each dimension: one where no attribute says, or one of zeros does.
static dim3 cluster_size(const cudaLaunchConfig_t &where) {
    for (unsigned i = 0; i < where.numAttrs; i++) {
        const auto &d = where.attrs[i].val.clusterDim;
        const bool any = d.x || d.y || d.z;
        if (where.attrs[i].id == cudaLaunchAttributeClusterDimension && any) return dim3(d.x, d.y, d.z);
    }
    return dim3();
}

// For ThreadSanitizer, what the grid did: what follows in the stream comes after it, unless the grid allowed otherwise.
static void see_end(CUstream_st &s, job &j) {
    if (!tsan::on) return;
    if (!j.triggered) return tsan::acquire(&j);
    tsan::as what_is_done(s.completion);
    tsan::acquire(&j);
    tsan::release(&s.ends[s.pending++ % 16]);
}

static std::map<char *, size_t> allocations; // the adversary's device memory

// Runs the grid; an error stays.
static void run_grid(const void *kernel, const cudaLaunchConfig_t &where, bool early, dim3 cluster_size,
                     const std::function<void()> &body) {
    if (broken) return;
    job j;
    j.kernel = kernel;
    j.body = &body;
    j.grid = where.gridDim;
    j.block = where.blockDim;
    j.cluster_size = cluster_size;
    j.clusters = dim3(j.grid.x / cluster_size.x, j.grid.y / cluster_size.y, j.grid.z / cluster_size.z);
    j.cluster_blocks = (int)(cluster_size.x * cluster_size.y * cluster_size.z);
    j.shared = where.dynamicSmemBytes;
    j.units = (unsigned long long)j.clusters.x * j.clusters.y * j.clusters.z;
    CUstream_st &s = *running;
    if (!early) settle(s);
    j.stream = &s;
    j.shift = s.number + (int)s.pending; // so that kernels which overlap are not on one OS thread
    tsan::release(&body);
    if (early && !s.unseen.empty()) j.unseen = &s.unseen;
    old_contents before;
    if (dependent_is_next) before = old_contents::of(allocations);
    the_pool().run(j);
    hide(j, false);
    if (hostile) {
        if (!early || !j.triggered_first) s.unseen.clear(); // else even the kernel in front may not have ended
        before.keep_changes();
        if (j.triggered) s.unseen.push_back(std::move(before));
        else s.unseen.clear();
    }
    see_end(s, j);
    if (!j.failed) return;
    locked guard(broken_lock);
    if (broken) return;
    snprintf(broken_message, sizeof broken_message, "%s", j.message.c_str());
    broken = true;
}

// Whether the kernel may start before the one in front of it has ended.
static bool starts_early(const cudaLaunchConfig_t &where) {
    for (unsigned i = 0; i < where.numAttrs; i++) {
        if (where.attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
            return where.attrs[i].val.programmaticStreamSerializationAllowed != 0;
    }
    return false;
}

static cudaError_t check_cluster(const void *kernel, dim3 grid, dim3 size) {
    if (!size.x || !size.y || !size.z) return cudaErrorInvalidClusterSize;
    if (grid.x % size.x || grid.y % size.y || grid.z % size.z) return cudaErrorInvalidClusterSize;
    const unsigned most = attributes_of(kernel).large_clusters ? cluster_most : cluster_portable;
    const bool few = size.x <= most && size.y <= most && size.z <= most && size.x * size.y * size.z <= most;
    return few ? cudaSuccess : cudaErrorInvalidClusterSize;
}

// All but the shared memory, of which the kernel's attributes say how much is allowed.
static cudaError_t check_config(const void *kernel, const cudaLaunchConfig_t &where) {
    const dim3 g = where.gridDim, b = where.blockDim;
    if (!kernel) return cudaErrorInvalidDeviceFunction;
    if (where.numAttrs && !where.attrs) return cudaErrorInvalidValue;
    for (unsigned i = 0; i < where.numAttrs; i++) {
        const cudaLaunchAttributeID id = where.attrs[i].id;
        if (id != cudaLaunchAttributeIgnore && id != cudaLaunchAttributeClusterDimension &&
            id != cudaLaunchAttributeProgrammaticStreamSerialization)
            return cudaErrorNotSupported;
    }
    if (!g.x || g.x > 0x7fffffff || !g.y || g.y > 65535 || !g.z || g.z > 65535) return cudaErrorInvalidConfiguration;
    if (!b.x || b.x > 1024 || !b.y || b.y > 1024 || !b.z || b.z > 64) return cudaErrorInvalidConfiguration;
    if ((unsigned long long)b.x * b.y * b.z > max_threads) return cudaErrorInvalidConfiguration;
    return where.numAttrs ? check_cluster(kernel, g, cluster_size(where)) : cudaSuccess;
}

static bool shared_fits(const void *kernel, const cudaLaunchConfig_t &where) {
    return where.dynamicSmemBytes <= attributes_of(kernel).shared;
}

cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *kernel, const cudaLaunchConfig_t *config) {
    if (!clusters || !config) return done(cudaErrorInvalidValue);
    if (cudaError_t error = check_config(kernel, *config)) return done(error);
    const dim3 size = cluster_size(*config);
    *clusters = shared_fits(kernel, *config) ? std::max(1, the_pool().size / (int)(size.x * size.y * size.z)) : 0;
    return done(cudaSuccess);
}

void cpu::at_dependency_wait() {
    if (!self) return;
    job &j = *self->grid;
    j.waited = true;
    hide(j, false);
    const CUstream_st &s = *j.stream;
    for (unsigned i = s.first_pending; i != s.pending; i++) tsan::acquire(&s.ends[i % 16]);
    interleave(*self);
}

cudaError_t cpu::launch(const void *kernel, const cudaLaunchConfig_t *where, std::function<void()> body) {
    if (self) fail("it launches a kernel, which the CPU device does not support");
    if (!where) return done(cudaErrorInvalidValue);
    cudaError_t error = check_config(kernel, *where);
    if (!error && !shared_fits(kernel, *where)) error = cudaErrorInvalidValue;
    tsan::hide_accesses when_the_body_is_freed; // the grid has read it
    if (!error)
        error = enqueue(where->stream, [kernel, where = *where, early = starts_early(*where),
                                        size = cluster_size(*where), body = std::move(body)] {
            run_grid(kernel, where, early, size, body); // the attributes may be gone by now
        }, starts_early(*where));
    body = nullptr;
    return done(error);
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory.

// A line of /proc/meminfo, in bytes; where there is none, more than enough.
static size_t meminfo(const char *key) {
    std::ifstream file("/proc/meminfo");
    std::string name, unit;
    for (size_t kib; file >> name >> kib && std::getline(file, unit);)
        if (name == key) return kib << 10;
    return (size_t)1 << 46;
}

cudaError_t cudaMalloc(void **p, size_t bytes) {
    if (!p) return done(cudaErrorInvalidValue);
    *p = nullptr;
    cudaError_t error = refuse_while_capturing();
    if (error || broken || bytes == 0) return done(error);
    if (bytes > 1 << 20 && bytes > meminfo("MemAvailable:")) return done(cudaErrorMemoryAllocation);
    if (posix_memalign(p, 256, bytes)) return done(cudaErrorMemoryAllocation);
    memset(*p, 0xff, bytes);
    if (hostile) {
        const alone lock = run_alone();
        allocations[(char *)*p] = bytes;
    }
    return done(cudaSuccess);
}

cudaError_t cudaFree(void *p) {
    const cudaError_t error = refuse_while_capturing();
    if (hostile && !error) {
        const alone lock = run_alone();
        drain_all();
        allocations.erase((char *)p);
        for (CUstream_st *s : all_streams) s->unseen.clear();
    }
    tsan::acquire(&all_done);
    if (!error) free(p);
    return done(error);
}

cudaError_t cudaMallocHost(void **p, size_t bytes, unsigned) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeHost(void *p) { return cudaFree(p); }

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return done(cudaErrorInvalidMemcpyDirection);
    if (bytes == 0) return done(cudaSuccess);
    if (!to || !from) return done(cudaErrorInvalidValue);
    const cudaError_t error = enqueue(stream, [=] { settle(*running), memmove(to, from, bytes); });
    if (kind != cudaMemcpyDeviceToDevice) { // as of memory that is not page-locked
        if (!stream || !stream->capture) drain(stream);
        seen_done(stream);
    }
    return done(error);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream) {
    if (bytes == 0) return done(cudaSuccess);
    if (!p) return done(cudaErrorInvalidValue);
    return done(enqueue(stream, [=] { settle(*running), memset(p, value, bytes); }));
}
cudaError_t cudaMemset(void *p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes, nullptr); }

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    if (!available || !total) return done(cudaErrorInvalidValue);
    *available = meminfo("MemAvailable:");
    *total = meminfo("MemTotal:");
    return done(cudaSuccess);
}

// ---------------------------------------------------------------------------------------------------------------------
// The device.

static std::string processor_name() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
        const size_t colon = line.find(": ");
        if (line.compare(0, 10, "model name") || colon == std::string::npos) continue;
        return "CPU (" + line.substr(colon + 2) + ")";
    }
    return "CPU";
}

static int cache_bytes() {
#ifdef _SC_LEVEL2_CACHE_SIZE
    const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (bytes > 0) return (int)bytes;
#endif
    return 1 << 20;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    if (!properties) return done(cudaErrorInvalidValue);
    if (device != 0) return done(cudaErrorInvalidDevice);
    cudaDeviceProp p{};
    const std::string adversary = hostile ? std::string(", adversary ") + seed.name : "";
    snprintf(p.name, sizeof p.name, "%s%s", processor_name().c_str(), adversary.c_str());
    p.totalGlobalMem = meminfo("MemTotal:");
    p.sharedMemPerBlock = shared_default;
    p.sharedMemPerBlockOptin = p.sharedMemPerMultiprocessor = shared_most;
    p.multiProcessorCount = the_pool().size;
    p.warpSize = warpSize;
    p.maxThreadsPerBlock = p.maxThreadsPerMultiProcessor = max_threads;
    p.l2CacheSize = cache_bytes();
    p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024, p.maxThreadsDim[2] = 64;
    p.maxGridSize[0] = 0x7fffffff, p.maxGridSize[1] = p.maxGridSize[2] = 65535;
    *properties = p;
    return done(cudaSuccess);
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    if (!value) return done(cudaErrorInvalidValue);
    cudaDeviceProp p;
    if (cudaError_t error = cudaGetDeviceProperties(&p, device)) return error;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrClusterLaunch: *value = 1; break;
    case cudaDevAttrComputeCapabilityMajor:
    case cudaDevAttrComputeCapabilityMinor:
    case cudaDevAttrCooperativeLaunch: *value = 0; break;
    default: return done(cudaErrorInvalidValue);
    }
    return done(cudaSuccess);
}

cudaError_t cudaGetDeviceCount(int *count) {
    if (!count) return done(cudaErrorInvalidValue);
    *count = 1;
    return done(cudaSuccess);
}

cudaError_t cudaSetDevice(int device) { return done(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }

cudaError_t cudaGetDevice(int *device) {
    if (!device) return done(cudaErrorInvalidValue);
    *device = 0;
    return done(cudaSuccess);
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    if (!version) return done(cudaErrorInvalidValue);
    *version = CUDART_VERSION;
    return done(cudaSuccess);
}
cudaError_t cudaDriverGetVersion(int *version) { return cudaRuntimeGetVersion(version); }

// ---------------------------------------------------------------------------------------------------------------------
// The driver's functions.

static CUresult encode_tiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                             const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                             const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                             CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                             CUtensorMapFloatOOBfill fill) {
    constexpr unsigned sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2}; // by type
    const CUresult bad = CUDA_ERROR_INVALID_VALUE;
    if (!map || (uintptr_t)map % 64 || !base || (uintptr_t)base % 16 || rank < 1 || rank > 2) return bad;
    if (!dims || !box || !element_strides || (rank > 1 && !strides)) return bad;
    if ((unsigned)type >= std::size(sizes) || (unsigned)promotion > CU_TENSOR_MAP_L2_PROMOTION_L2_256B) return bad;
    if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) return bad;
    if (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && swizzle != CU_TENSOR_MAP_SWIZZLE_128B) return bad;
    cpu::tensor t{cpu::tensor_mark, (char *)base, {1, 1}, 0, {1, 1}, rank, sizes[type], swizzle != 0};
    for (cuuint32_t i = 0; i < rank; i++) {
        if (dims[i] < 1 || dims[i] > 1ull << 32 || box[i] < 1 || box[i] > 256 || element_strides[i] != 1) return bad;
        t.dims[i] = dims[i];
        t.box[i] = box[i];
    }
    if (rank > 1) {
        if (strides[0] % 16 || strides[0] >= 1ull << 40) return bad;
        t.row_bytes = strides[0];
    }
    const unsigned row = t.box[0] * t.element_bytes;
    if (row % 16 || (t.swizzled && row > 128)) return bad;
    *map = {};
    memcpy(map, &t, sizeof t);
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult *found) {
    if (!symbol || !function || version > CUDART_VERSION || flags > cudaEnablePerThreadDefaultStream)
        return done(cudaErrorInvalidValue);
    const bool known = !strcmp(symbol, "cuTensorMapEncodeTiled"), there = known && version >= 12000;
    const PFN_cuTensorMapEncodeTiled_v12000 encode = encode_tiled;
    *function = there ? (void *)encode : nullptr;
    if (found)
        *found = there ? cudaDriverEntryPointSuccess
                       : known ? cudaDriverEntryPointVersionNotSufficent : cudaDriverEntryPointSymbolNotFound;
    return done(cudaSuccess);
}
