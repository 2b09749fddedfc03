// Calls the library from several host threads at the same time, on either device.
//
//   threads [ROUNDS]      four threads, each with its own stream and shapes, make every call ROUNDS times (default 3). No
//                         call is refused, and all results have the bits of one thread's. Then: a pending CUDA error and
//                         the current device survive every call. Exit status 0 if so, else 1 and a line per fault.
//   threads --host-time   microseconds of the calling thread per call (the GPU works meanwhile)
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../lib/bookends.h"

static std::atomic<int> failures{0};

__attribute__((format(printf, 2, 3))) static void expect(bool ok, const char *pattern, ...) {
    if (ok || failures++ >= 20) return;
    char line[400];
    va_list arguments;
    va_start(arguments, pattern);
    vsnprintf(line, sizeof(line), pattern, arguments);
    va_end(arguments);
    printf("%s\n", line);
}

static void check(cudaError_t error) {
    if (error == cudaSuccess) return;
    printf("%s\n", cudaGetErrorString(error));
    exit(1);
}

// Device memory, filled from the host.
struct Array {
    std::vector<unsigned char> initial;
    unsigned char *pointer = nullptr;

    explicit Array(std::vector<unsigned char> bytes) : initial(std::move(bytes)) {
        check(cudaMalloc((void **)&pointer, std::max<size_t>(initial.size(), 1)));
        check(cudaMemcpy(pointer, initial.data(), initial.size(), cudaMemcpyHostToDevice));
    }
    Array(const Array &) = delete;
    ~Array() { cudaFree(pointer); }
};

static uint32_t random_bits(uint32_t *state) { return (*state = *state * 1664525u + 1013904223u) >> 8; }

// Numbers in [-2, 2) of the type.
static std::vector<unsigned char> numbers(size_t count, bk_dtype dtype, uint32_t seed) {
    std::vector<unsigned char> bytes(count * (dtype == BK_FP32 ? 4 : 2));
    for (size_t i = 0; i < count; i++) {
        const float value = (float)random_bits(&seed) * 0x1p-22f - 2.0f;
        uint32_t bits;
        memcpy(&bits, &value, 4);
        const uint16_t upper = (uint16_t)(bits >> 16);  // bfloat16
        if (dtype == BK_FP32) {
            memcpy(&bytes[4 * i], &bits, 4);
        } else {
            memcpy(&bytes[2 * i], &upper, 2);
        }
    }
    return bytes;
}

static std::vector<unsigned char> ids(size_t count, int V, uint32_t seed) {
    std::vector<unsigned char> bytes(count * 4);
    for (size_t i = 0; i < count; i++) {
        const int32_t id = (int32_t)(random_bits(&seed) % (uint32_t)V);
        memcpy(&bytes[4 * i], &id, 4);
    }
    return bytes;
}

// The ids N-1 to 0.
static std::vector<unsigned char> distinct_ids(int N) {
    std::vector<unsigned char> bytes(N * 4);
    for (int32_t i = 0; i < N; i++) {
        const int32_t id = N - 1 - i;
        memcpy(&bytes[4 * i], &id, 4);
    }
    return bytes;
}

// A call of the library with memory for its own use, and the bits of its results when one thread makes it.
struct Call {
    std::string name;
    std::vector<std::unique_ptr<Array>> arrays = {};
    std::vector<Array *> outputs = {};
    std::shared_ptr<bk_lm_head> plan = {};
    bool refuses_pending = false;  // returns the caller's pending CUDA error and does nothing
    std::function<int(cudaStream_t)> run = {};
    std::vector<std::vector<unsigned char>> expected = {};

    void *add(std::vector<unsigned char> bytes) {
        arrays.emplace_back(new Array(std::move(bytes)));
        return arrays.back()->pointer;
    }
    void *add_output(size_t bytes) {
        void *const pointer = add(std::vector<unsigned char>(bytes, 0));
        outputs.push_back(arrays.back().get());
        return pointer;
    }

    // Sets the outputs to zeros, makes the call, and fetches them.
    int results(std::vector<std::vector<unsigned char>> *got, cudaStream_t stream) const {
        for (Array *output : outputs) check(cudaMemsetAsync(output->pointer, 0, output->initial.size(), stream));
        const int error = run(stream);
        got->clear();
        for (Array *output : outputs) {
            got->emplace_back(output->initial.size());
            check(cudaMemcpyAsync(got->back().data(), output->pointer, output->initial.size(), cudaMemcpyDeviceToHost,
                                  stream));
        }
        check(cudaStreamSynchronize(stream));
        return error;
    }
};

static size_t size_of(bk_dtype dtype) { return dtype == BK_FP32 ? 4 : 2; }

__attribute__((format(printf, 1, 2))) static std::string text(const char *pattern, ...) {
    char line[200];
    va_list arguments;
    va_start(arguments, pattern);
    vsnprintf(line, sizeof(line), pattern, arguments);
    va_end(arguments);
    return line;
}

static Call forward_call(int B, int T, int C, int V, bk_dtype dtype, int version) {
    Call call{text("bk_encoder_forward version %d, B %d, T %d, C %d, V %d", version, B, T, C, V)};
    void *const out = call.add_output((size_t)B * T * C * size_of(dtype));
    void *const inp = call.add(ids((size_t)B * T, V, 1)), *const wte = call.add(numbers((size_t)V * C, dtype, 2));
    void *const wpe = call.add(numbers((size_t)T * C, dtype, 3));
    call.run = [=](cudaStream_t stream) {
        return bk_encoder_forward(out, (int32_t *)inp, wte, wpe, nullptr, B, T, C, V, dtype, version, stream);
    };
    return call;
}

static Call backward_call(int B, int T, int C, int V, bk_dtype dtype, int version) {
    Call call{text("bk_encoder_backward version %d, B %d, T %d, C %d, V %d", version, B, T, C, V)};
    void *const dwte = call.add_output((size_t)V * C * size_of(dtype));
    void *const dwpe = call.add_output((size_t)T * C * size_of(dtype));
    void *const dout = call.add(numbers((size_t)B * T * C, dtype, 4)), *const inp = call.add(ids((size_t)B * T, V, 5));
    const size_t bytes = bk_encoder_backward_workspace_bytes(B, T, C, V, version);
    void *const workspace = call.add(std::vector<unsigned char>(bytes, 0xff));
    call.run = [=](cudaStream_t stream) {
        return bk_encoder_backward(dwte, dwpe, dout, (int32_t *)inp, nullptr, workspace, B, T, C, V, dtype, dtype, 0, 0,
                                   version, stream);
    };
    return call;
}

static Call lookup_call(int N, int C, int V, bk_dtype dtype, int version) {
    Call call{text("bk_embedding_lookup version %d, N %d, C %d, V %d", version, N, C, V)};
    void *const out = call.add_output((size_t)N * C * size_of(dtype));
    void *const idx = call.add(ids(N, V, 13)), *const table = call.add(numbers((size_t)V * C, dtype, 14));
    call.run = [=](cudaStream_t stream) {
        return bk_embedding_lookup(out, idx, table, nullptr, N, C, V, C, dtype, dtype, BK_INT32, version, stream);
    };
    return call;
}

static Call bag_call(int bags, int hotness, int C, int V, bk_dtype dtype, int version) {
    Call call{text("bk_embedding_bag version %d, %d bags of %d, C %d, V %d", version, bags, hotness, C, V)};
    const int count = bags * hotness;
    void *const out = call.add_output((size_t)bags * C * size_of(dtype));
    void *const idx = call.add(ids(count, V, 15)), *const table = call.add(numbers((size_t)V * C, dtype, 16));
    call.run = [=](cudaStream_t stream) {
        bk_bag_options options = BK_BAG_OPTIONS;
        options.hotness = hotness;
        return bk_embedding_bag(out, nullptr, idx, table, nullptr, count, bags, C, V, C, &options, dtype, dtype,
                                BK_INT32, version, stream);
    };
    return call;
}

static Call bag_backward_call(int bags, int hotness, int C, int V, bk_dtype dtype, int version) {
    Call call{text("bk_embedding_bag_backward version %d, %d bags of %d, C %d", version, bags, hotness, C)};
    call.refuses_pending = true;
    const int count = bags * hotness;
    bk_bag_options bags_of_hotness = BK_BAG_OPTIONS;
    bags_of_hotness.hotness = hotness;
    void *const dtable = call.add_output((size_t)count * C * 4), *const indices = call.add_output(count * 8);
    void *const distinct = call.add_output(8), *const idx = call.add(ids(count, V, 17));
    void *const dout = call.add(numbers((size_t)bags * C, dtype, 18));
    const size_t bytes = bk_embedding_bag_backward_workspace_bytes(count, bags, C, V, &bags_of_hotness);
    void *const workspace = call.add(std::vector<unsigned char>(bytes, 0xff));
    call.run = [=](cudaStream_t stream) {
        return bk_embedding_bag_backward(dtable, (int64_t *)indices, (int64_t *)distinct, nullptr, dout, nullptr, idx,
                                         nullptr, nullptr, workspace, count, bags, C, V, C, &bags_of_hotness, dtype, BK_FP32,
                                         0, BK_INT32, version, stream);
    };
    return call;
}

static Call update_call(int N, int C, int V, bk_dtype dtype, bk_update_op op, int version) {
    Call call{text("bk_embedding_update op %d version %d, N %d, C %d", op, version, N, C)};
    call.refuses_pending = op == BK_UPDATE_ACCUMULATE;
    void *const table = call.add_output((size_t)V * C * size_of(dtype)), *const idx = call.add(ids(N, V, 19));
    void *const values = call.add(numbers((size_t)N * C, BK_FP32, 20));
    const size_t bytes = bk_embedding_update_workspace_bytes(N, C, V, op, 0, version);
    void *const workspace = call.add(std::vector<unsigned char>(bytes, 0xff));
    call.run = [=](cudaStream_t stream) {
        return bk_embedding_update(table, idx, values, nullptr, workspace, N, C, V, C, op, 0.5f, dtype, BK_FP32, 0, 0,
                                   BK_INT32, version, stream);
    };
    return call;
}

static Call optimizer_call(int N, int C, bk_dtype dtype, int version) {
    Call call{text("bk_embedding_optimizer version %d, N %d, C %d", version, N, C)};
    void *const table = call.add_output((size_t)N * C * size_of(dtype)), *const idx = call.add(distinct_ids(N));
    void *const gradients = call.add(numbers((size_t)N * C, BK_FP32, 21)), *const state = call.add_output(N * 4);
    call.run = [=](cudaStream_t stream) {
        bk_optimizer_options options = BK_OPTIMIZER_OPTIONS;
        options.kind = BK_ROWWISE_ADAGRAD;
        return bk_embedding_optimizer(table, nullptr, (float *)state, idx, gradients, nullptr, nullptr, N, C, N, C,
                                      &options, dtype, BK_FP32, BK_INT32, version, stream);
    };
    return call;
}

static Call classifier_call(int N, int V, bk_dtype dtype, int version) {
    Call call{text("bk_classifier_fused version %d, N %d, V %d", version, N, V)};
    void *const dlogits = call.add_output((size_t)N * V * size_of(dtype)), *const losses = call.add_output(N * 4);
    void *const logits = call.add(numbers((size_t)N * V, dtype, 6)), *const targets = call.add(ids(N, V, 7));
    call.run = [=](cudaStream_t stream) {
        return bk_classifier_fused(dlogits, (float *)losses, nullptr, nullptr, nullptr, logits, (int32_t *)targets,
                                   nullptr, nullptr, N, V, V, nullptr, dtype, version, stream);
    };
    return call;
}

static Call totals_call(int N) {
    Call call{text("bk_classifier_totals N %d", N)};
    void *const rows = call.add_output(4), *const total = call.add_output(4);
    void *const targets = call.add(ids(N, 1000, 11)), *const losses = call.add(numbers(N, BK_FP32, 12));
    call.run = [=](cudaStream_t stream) {
        return bk_classifier_totals((float *)rows, (float *)total, (int32_t *)targets, (float *)losses, N, 0, stream);
    };
    return call;
}

static Call lm_head_call(int N, int C, int V, bk_dtype dtype, int version) {
    Call call{text("bk_lm_head_run version %d, N %d, C %d, V %d", version, N, C, V)};
    bk_lm_head *plan = nullptr;
    const int error = bk_lm_head_create(&plan, N, C, V, BK_LM_HEAD_DX | BK_LM_HEAD_DW, nullptr,
                                        version < 3 ? 0 : 1 << 26, 0, dtype, BK_FP32, version, nullptr);
    expect(error == BK_OK, "%s: no plan: %s", call.name.c_str(), bk_last_message());
    call.plan.reset(plan, bk_lm_head_destroy);
    void *const dX = call.add_output((size_t)N * C * size_of(dtype)), *const dW = call.add_output((size_t)V * C * 4);
    void *const losses = call.add_output(N * 4), *const targets = call.add(ids(N, V, 10));
    void *const X = call.add(numbers((size_t)N * C, dtype, 8)), *const W = call.add(numbers((size_t)V * C, dtype, 9));
    void *const workspace = call.add(std::vector<unsigned char>(bk_lm_head_workspace_bytes(plan), 0xff));
    call.run = [=](cudaStream_t stream) {
        return bk_lm_head_run(plan, dX, dW, nullptr, (float *)losses, nullptr, X, W, nullptr, (int32_t *)targets,
                              nullptr, nullptr, nullptr, workspace, stream);
    };
    return call;
}

// The calls of thread 0..3. Shapes differ from thread to thread, so that launches of one kernel differ in their shared
// memory and their clusters.
static std::vector<Call> calls_of(int thread) {
    const int vocabularies[] = {20480, 151936, 32000, 151936};
    const bk_dtype dtype = thread == 2 ? BK_FP32 : BK_BF16;
    std::vector<Call> calls;
    calls.push_back(classifier_call(1, vocabularies[thread], BK_BF16, 0));
    calls.push_back(classifier_call(3, vocabularies[3 - thread] / 2 + 8 * thread, dtype, 0));
    calls.push_back(classifier_call(2, 1000 + 7 * thread, dtype, thread + 1));
    calls.push_back(totals_call(100 << thread));
    calls.push_back(forward_call(2, 16 << thread, 24 + 8 * thread, 1000, dtype, 0));
    calls.push_back(forward_call(1, 8, 24, 1000, dtype, thread + 1));
    calls.push_back(backward_call(2, 16 << thread, 24 + 8 * thread, thread % 2 == 0 ? 300 : 20000, dtype, 0));
    calls.push_back(backward_call(3, 40, 16, 500 << thread, dtype, 4 + thread % 2));
    calls.push_back(lookup_call(16 << thread, 24 + 8 * thread, 1000, dtype, thread < 3 ? 0 : 3));
    calls.push_back(bag_call(2 << thread, 3 + 300 * thread, 24 + 8 * thread, 1000, dtype, thread < 3 ? 0 : 2));
    calls.push_back(bag_backward_call(8 << thread, 7, 24 + 8 * thread, 100, dtype, thread < 3 ? 0 : 2));
    calls.push_back(update_call(30 << thread, 24 + 8 * thread, 100, dtype, BK_UPDATE_OVERWRITE, thread < 3 ? 0 : 3));
    calls.push_back(update_call(30 << thread, 24 + 8 * thread, 100, dtype, BK_UPDATE_ACCUMULATE, 0));
    calls.push_back(optimizer_call(30 << thread, 24 + 8 * thread, dtype, thread < 3 ? 0 : 2));
    calls.push_back(lm_head_call(5 + thread, 16 + 8 * thread, 600 + 100 * thread, dtype, 0));
    calls.push_back(lm_head_call(9, 16, 300, BK_BF16, thread + 1));
    return calls;
}

constexpr int kThreads = 4;

// Calls work(t, stream) in each thread t, with a stream for each.
template <typename Work>
static void in_threads(Work work) {
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; t++) {
        threads.emplace_back([=] {
            cudaStream_t stream;
            check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            work(t, stream);
            check(cudaStreamDestroy(stream));
        });
    }
    for (std::thread &thread : threads) thread.join();
}

static void test_threads(const std::vector<Call> *calls, int rounds) {
    in_threads([=](int t, cudaStream_t stream) {
        std::vector<std::vector<unsigned char>> got;
        for (int round = 0; round < rounds; round++) {
            for (const Call &call : calls[t]) {
                const int error = call.results(&got, stream);
                expect(error == BK_OK, "%s: %s", call.name.c_str(), error == BK_OK ? "" : bk_last_message());
                expect(error != BK_OK || got == call.expected, "%s: other bits", call.name.c_str());
            }
        }
    });
}

// One row per call and nothing else, so that launches of one kernel with different needs meet as often as possible.
static void test_launches(const std::vector<Call> *calls, int launches) {
    in_threads([=](int t, cudaStream_t stream) {
        for (int i = 0; i < launches; i++) {
            const int error = calls[t][0].run(stream);
            expect(error == BK_OK, "%s: %s", calls[t][0].name.c_str(), error == BK_OK ? "" : bk_last_message());
        }
        check(cudaStreamSynchronize(stream));
    });
}

// A capture that failed refuses every launch.
static void test_state(const Call &call, cudaStream_t stream) {
    const char *const name = call.name.c_str();
    auto capture_failed = [&](auto then) {
        cudaGraph_t graph = nullptr;
        void *memory = nullptr;
        check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        cudaMalloc(&memory, 16);  // is forbidden now, and ends the capture
        cudaGetLastError();
        then();
        cudaStreamEndCapture(stream, &graph);
        cudaGetLastError();
    };
    int before = -1, after = -1;
    check(cudaGetDevice(&before));
    expect(call.run(stream) == BK_OK && cudaPeekAtLastError() == cudaSuccess, "%s: leaves an error", name);
    void *memory = nullptr;
    const cudaError_t pending = cudaMalloc(&memory, (size_t)1 << 60);
    const int expected = call.refuses_pending ? BK_ERROR_CUDA + (int)pending : BK_OK;
    expect(call.run(stream) == expected, "%s: with an earlier call's error: %s", name, bk_last_message());
    expect(pending != cudaSuccess && cudaGetLastError() == pending, "%s: the pending error does not survive", name);
    check(cudaStreamSynchronize(stream));
    capture_failed([&] {
        const int error = call.run(stream);
        expect(error > BK_ERROR_CUDA, "%s: launches in a failed capture: %d", name, error);
        expect(cudaPeekAtLastError() == cudaSuccess, "%s: leaves its own error pending", name);
    });
    check(cudaGetDevice(&after));
    expect(before == after, "%s: changes the device", name);
}

static void print_host_times(const std::vector<Call> &calls, cudaStream_t stream) {
    using clock = std::chrono::steady_clock;
#ifdef BOOKENDS_CPU
    constexpr int kCalls = 2, kBatches = 3;  // a call returns when its work is done
#else
    constexpr int kCalls = 50, kBatches = 21;
#endif
    for (const Call &call : calls) {
        std::vector<double> times;
        for (int batch = 0; batch < kBatches; batch++) {
            const auto begin = clock::now();
            for (int i = 0; i < kCalls; i++) call.run(stream);
            times.push_back(std::chrono::duration<double, std::micro>(clock::now() - begin).count() / kCalls);
            check(cudaStreamSynchronize(stream));
        }
        std::sort(times.begin(), times.end());
        printf("%7.2f us  %s\n", times[kBatches / 2], call.name.c_str());
    }
}

int main(int argc, char **argv) {
    const bool host_time = argc > 1 && strcmp(argv[1], "--host-time") == 0;
    const int rounds = argc > 1 && !host_time ? atoi(argv[1]) : 3;
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    std::vector<Call> calls[kThreads];
    for (int t = 0; t < kThreads; t++) {
        calls[t] = calls_of(t);
        if (host_time) continue;
        for (Call &call : calls[t]) {
            const int error = call.results(&call.expected, stream);
            expect(error == BK_OK, "%s: %s", call.name.c_str(), error == BK_OK ? "" : bk_last_message());
        }
    }
    if (host_time) {
        for (const std::vector<Call> &some : calls) print_host_times(some, stream);
        return failures > 0;
    }
    test_threads(calls, rounds);
    test_launches(calls, 10 * rounds);
    for (const Call &call : calls[1]) test_state(call, stream);
    if (failures == 0) printf("ok\n");
    return failures > 0;
}
