/*
Kernels with planted faults, which the harness must find. N = B*T rows; C is at least 2.

- out (N, C) is inp (N, C), but out[0,0] is NaN, out[0,1] infinite and out[1,0] zero
- first (N) is the first column of inp, in float
- rounded (N) is slightly more than that, in type floatX: of each three rows, the first may have an error of SLACK, the
  second may be rounded up or down, the third must be rounded to nearest
- in even rows of total (N) the first column is added, and the others keep their values; with --overwrite total is the
  first column; with --used-up its initial values are restored before each cold run
- the workspace has SCRATCH bytes; another one has none

The table names the fault of each version. Environment variables:

- PLANTED_DUMP=FILE: writes the ids and the inputs on the device to FILE.ids (int32) and FILE.inp (floatX), and at the
  end total to FILE.total
- PLANTED_SKIP=" 3 4 ": those versions are skipped
- PLANTED_SWEEP=1: no block sizes but two values of --note, "one" and "the other", and a baseline that copies inp;
  `tune` writes the right results to total, and the check restores its initial values
- PLANTED_UNKNOWN=1: the reference does not know the last row of first
- PLANTED_SLEEP_MS=INT: each launch sleeps first, for that many milliseconds
- PLANTED_ULPS=1: only answers each line "TYPE RESULT VALUE SLACK EITHER_NEIGHBOUR" of standard input by ulp_error()
*/
#include "../harness/harness.h"

using namespace bookends;

constexpr double SLACK = 0x1p-7, A_LITTLE = 0x1p-30;  // the latter as a part of a number, far below its ulp
constexpr int SCRATCH = 100, OWN_REFERENCE_VERSION = 36;

enum Fault {
    NONE,
    ONE_ULP,
    TWO_ULPS,
    LAST_UNWRITTEN,
    PAST_THE_END,
    FAR_PAST_THE_END,
    BEFORE_THE_BEGINNING,
    AT_1024,
    A_NAN,
    AN_INFINITY,
    NO_NAN,
    NO_INFINITY,
    SECOND_OUTPUT,
    BAD_ID,
    NOTHING,
    NOTHING_THE_SECOND_TIME,
    LAUNCH_ERROR,
    NOT_QUITE_ZERO,
    OFF_BY_SLACK,
    OFF_BY_MORE,
    OTHER_NEIGHBOUR,
    NO_NEIGHBOUR,
    NOT_THE_NEAREST,
    NOT_ADDED,
    UNTOUCHED_CHANGED,
    BEFORE_TOTAL,
    WHOLE_WORKSPACE,
    PAST_THE_WORKSPACE,
    IN_NO_WORKSPACE,
    WORKSPACE_NOT_CLEARED,
    ONE_ULP_THE_SECOND_TIME,
    ONE_ULP_AT_1024,
    ONE_ULP_THE_SECOND_TIME_AT_1024,
    ANOTHER_NAN_AT_512,
    OWN_REFERENCE,
};

template <typename floatX>
struct Arrays {
    floatX *out;
    float *first;
    floatX *rounded, *total;
    char *workspace, *no_workspace;
    const floatX *inp;
    status_word *status;
    long long N;
    int C;
    bool overwrite;
};

template <typename floatX>
__global__ void copy_kernel(floatX *out, const floatX *inp, int C, long long count) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    out[i] = i == 0 ? quiet_nan<floatX>() : i == 1 ? (floatX)INFINITY : i == C ? (floatX)0.0f : inp[i];
}

template <typename floatX>
__global__ void rows_kernel(Arrays<floatX> a, bool add) {
    const long long r = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= a.N) return;
    const float value = (float)a.inp[r * a.C];
    a.first[r] = value;
    a.rounded[r] = (floatX)value;
    if (add && a.overwrite) a.total[r] = (floatX)value;
    if (add && !a.overwrite && r % 2 == 0) a.total[r] = (floatX)((float)a.total[r] + value);
}

// Moves a number in [-1, 1) by a number of ulps of its type, away from 0.
template <typename floatX>
__global__ void move_kernel(floatX *element, int ulps) {
    typename Bits<sizeof(floatX) == 2 ? 2 : 4>::type bits;
    memcpy(&bits, element, sizeof(floatX));
    bits += ulps;
    memcpy(element, &bits, sizeof(floatX));
}

// The same, by a distance.
template <typename floatX>
__global__ void stretch_kernel(floatX *element, float distance) {
    *element = (floatX)((float)*element + copysignf(distance, (float)*element));
}

template <typename T>
__global__ void set_kernel(T *element, T value) {
    *element = value;
}

template <typename floatX>
using Planted = cudaError_t (*)(const Arrays<floatX> &a, int block_size, cudaStream_t stream);

template <typename floatX, Fault fault>
cudaError_t planted(const Arrays<floatX> &a, int block_size, cudaStream_t stream) {
    static int calls = 0, calls_at_1024 = 0;
    const bool second = ++calls == 2, second_at_1024 = block_size == 1024 && ++calls_at_1024 == 2;
    if (fault == NOTHING || (fault == NOTHING_THE_SECOND_TIME && second)) return cudaSuccess;
    if (fault == LAUNCH_ERROR) block_size = 2048;
    const long long N = a.N, C = a.C, count = N * C - (fault == LAST_UNWRITTEN);
    const unsigned grid_size = ceil_div(N * C, (long long)block_size);
    copy_kernel<floatX><<<grid_size, block_size, 0, stream>>>(a.out, a.inp, a.C, count);
    rows_kernel<floatX><<<grid_size, block_size, 0, stream>>>(a, fault != NOT_ADDED);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;

    const auto move = [&](floatX *element, int ulps) { move_kernel<floatX><<<1, 1, 0, stream>>>(element, ulps); };
    const auto set = [&](auto *element, auto value) {
        set_kernel<decltype(value)><<<1, 1, 0, stream>>>(element, value);
    };
    floatX *const victim = a.out + (N * C - 1 - C / 2);
    const floatX one = (floatX)1.0f;
    if (fault == ONE_ULP) move(victim, 1);
    if (fault == TWO_ULPS || (fault == AT_1024 && block_size == 1024)) move(victim, 2);
    if (fault == PAST_THE_END) set(a.out + N * C, one);
    if (fault == FAR_PAST_THE_END) set((char *)(a.out + N * C) + 65535, (char)0);
    if (fault == BEFORE_THE_BEGINNING) set(a.out - 1, one);
    if (fault == A_NAN) set(victim, (floatX)NAN);
    if (fault == AN_INFINITY) set(victim, (floatX)-INFINITY);
    if (fault == NO_NAN) set(a.out, one);
    if (fault == NO_INFINITY) set(a.out + 1, (floatX)-INFINITY);
    if (fault == NOT_QUITE_ZERO) set(a.out + C, (floatX)0x1p-20f);
    if (fault == SECOND_OUTPUT) set(a.first + N - 1, 2.0f);
    if (fault == OWN_REFERENCE) set(a.first, 2.0f);
    if (fault == BAD_ID) set(a.status, (status_word)5);
    if (fault == OFF_BY_SLACK || fault == OFF_BY_MORE) stretch_kernel<floatX><<<1, 1, 0, stream>>>(a.rounded, SLACK);
    if (fault == OFF_BY_MORE) move(a.rounded, 1);
    if (fault == OTHER_NEIGHBOUR) move(a.rounded + 1, 1);
    if (fault == NO_NEIGHBOUR) move(a.rounded + 1, -1);
    if (fault == NOT_THE_NEAREST) move(a.rounded + 2, 1);
    if (fault == UNTOUCHED_CHANGED) set(a.total + 1, one);
    if (fault == BEFORE_TOTAL) set(a.total - 1, one);
    if (fault == WHOLE_WORKSPACE) cudaMemsetAsync(a.workspace, 0, SCRATCH, stream);
    if (fault == PAST_THE_WORKSPACE) set(a.workspace + SCRATCH, (char)0);
    if (fault == IN_NO_WORKSPACE) set(a.no_workspace, (char)0);
    if (fault == WORKSPACE_NOT_CLEARED) cudaMemcpyAsync(a.first, a.workspace, 4, cudaMemcpyDeviceToDevice, stream);
    if (fault == ONE_ULP_THE_SECOND_TIME && second) move(victim, 1);
    if (fault == ONE_ULP_AT_1024 && block_size == 1024) move(victim, 1);
    if (fault == ONE_ULP_THE_SECOND_TIME_AT_1024 && second_at_1024) move(victim, 1);
    if (fault == ANOTHER_NAN_AT_512 && block_size == 512) move(a.out, -1);
    return cudaGetLastError();
}

template <typename floatX>
constexpr Version<Planted<floatX>> planted_versions[] = {
    {1, "right", "no fault", planted<floatX, NONE>, 256},
    {2, "one ulp", "one element is an ulp off, which is allowed", planted<floatX, ONE_ULP>, 256},
    {3, "two ulps", "one element is two ulps off", planted<floatX, TWO_ULPS>, 256},
    {4, "last unwritten", "the last element is not written", planted<floatX, LAST_UNWRITTEN>, 256},
    {5, "past the end", "an element past the end", planted<floatX, PAST_THE_END>, 256},
    {6, "far past the end", "a byte far past the end", planted<floatX, FAR_PAST_THE_END>, 256},
    {7, "before", "an element before the beginning", planted<floatX, BEFORE_THE_BEGINNING>, 256},
    {8, "at 1024", "wrong only at block size 1024", planted<floatX, AT_1024>, 256},
    {9, "a NaN", "one element is NaN", planted<floatX, A_NAN>, 256},
    {10, "an infinity", "one element is infinite", planted<floatX, AN_INFINITY>, 256},
    {11, "no NaN", "a number where there should be NaN", planted<floatX, NO_NAN>, 256},
    {12, "no infinity", "the other infinity", planted<floatX, NO_INFINITY>, 256},
    {13, "second output", "only the second output is wrong", planted<floatX, SECOND_OUTPUT>, 256},
    {14, "bad id", "reports an id that there is not", planted<floatX, BAD_ID>, 256},
    {15, "nothing", "launches nothing", planted<floatX, NOTHING>, 256},
    {16, "once", "launches nothing the second time", planted<floatX, NOTHING_THE_SECOND_TIME>, 256},
    {17, "launch error", "asks for an impossible block size", planted<floatX, LAUNCH_ERROR>, 256},
    {18, "a \"right\" \\ one", "no fault, and a \"name\" to quote", planted<floatX, NONE>, 256},
    {19, "not quite zero", "a small number where there should be 0", planted<floatX, NOT_QUITE_ZERO>, 256},
    {20, "off by slack", "one element is off by what is allowed", planted<floatX, OFF_BY_SLACK>, 256},
    {21, "off by more", "one element is off by an ulp more", planted<floatX, OFF_BY_MORE>, 256},
    {22, "other neighbour", "one element is rounded up", planted<floatX, OTHER_NEIGHBOUR>, 256},
    {23, "no neighbour", "one element is rounded beyond the number below", planted<floatX, NO_NEIGHBOUR>, 256},
    {24, "not added", "the total stays as it was", planted<floatX, NOT_ADDED>, 256},
    {25, "untouched changed", "a row of the total that should stay", planted<floatX, UNTOUCHED_CHANGED>, 256},
    {26, "before the total", "an element before the total", planted<floatX, BEFORE_TOTAL>, 256},
    {27, "workspace", "writes the whole workspace", planted<floatX, WHOLE_WORKSPACE>, 256},
    {28, "past workspace", "a byte past the workspace", planted<floatX, PAST_THE_WORKSPACE>, 256},
    {29, "no workspace", "a byte of the workspace of none", planted<floatX, IN_NO_WORKSPACE>, 256},
    {30, "not cleared", "takes the workspace for cleared", planted<floatX, WORKSPACE_NOT_CLEARED>, 256},
    {31, "changes", "an ulp off the second time", planted<floatX, ONE_ULP_THE_SECOND_TIME>, 256},
    {32, "block size", "an ulp off at block size 1024", planted<floatX, ONE_ULP_AT_1024>, 256},
    {33, "another NaN", "other bits of a NaN at block size 512", planted<floatX, ANOTHER_NAN_AT_512>, 256},
    {34, "not reproducible", "version 32, not reproducible", planted<floatX, ONE_ULP_AT_1024>, 256,
     kNotReproducible},
    {35, "not the nearest", "one element is rounded up, not down", planted<floatX, NOT_THE_NEAREST>, 256},
    {OWN_REFERENCE_VERSION, "own reference", "right by a reference of its own", planted<floatX, OWN_REFERENCE>, 256},
    {37, "same at one size", "an ulp off the second time at 1024", planted<floatX, ONE_ULP_THE_SECOND_TIME_AT_1024>,
     256, kSameAtABlockSize},
    {38, "promises less", "version 32, reproducible at one block size", planted<floatX, ONE_ULP_AT_1024>,
     256, kSameAtABlockSize},
};

static void dump(const std::string &suffix, const void *device, size_t size) {
    const char *path = getenv("PLANTED_DUMP");
    if (!path) return;
    std::vector<char> host(size);
    cuda_check(cudaMemcpy(host.data(), device, size, cudaMemcpyDeviceToHost));
    FILE *file = fopen((path + suffix).c_str(), "wb");
    if (!file || fwrite(host.data(), 1, size, file) != size || fclose(file) != 0) abort();
}

static int answer_ulps() {
    char type[8];
    double result, value, slack;
    int either;
    while (scanf("%7s %lf %lf %lf %d", type, &result, &value, &slack, &either) == 5) {
        const std::string name = type;
        printf("%.17g\n", name == "fp32"   ? ulp_error((float)result, value, slack, either)
                          : name == "fp16" ? ulp_error((half)(float)result, value, slack, either)
                                           : ulp_error((__nv_bfloat16)(float)result, value, slack, either));
    }
    return 0;
}

template <typename floatX>
void planted_race(Harness &h) {
    Arrays<floatX> a = {};
    a.N = (long long)h.options.dim('b') * h.options.dim('t');
    a.C = h.options.dim('c');
    a.overwrite = h.options.flag("--overwrite");
    const int C = a.C;
    const int V = h.options.dim('v');
    const int *ids = h.options.flag("--targets") ? h.targets(a.N, V, 3, -100) : h.tokens(a.N, V);
    const Values<floatX> values = {h.options.dim('p'), h.options.seed}, initial = {100, h.options.seed};
    const auto first = [=](long long r) { return (double)(float)values[r * C]; };
    a.inp = h.input(values, a.N * C);
    a.status = h.status();
    a.out = h.output<floatX>("out", a.N, C, 1, [=](Expected &row, long long r) {
        for (int c = 0; c < C; c++) row.value[c] = (double)(float)values[r * C + c];
        if (r == 0) row.value[0] = row.slack[0] = NAN;
        if (r == 0) row.value[1] = row.slack[1] = INFINITY;  // as a sum's would be
        if (r == 1) row.value[0] = 0;
    });
    const bool sweeps = getenv("PLANTED_SWEEP"), last_unknown = getenv("PLANTED_UNKNOWN");
    a.first = h.output<float>("first", a.N, 1, 0, [=, &h](Expected &row, long long r) {
        row.unknown = last_unknown && r == a.N - 1;
        row.value[0] = r == 0 && h.running == OWN_REFERENCE_VERSION ? 2 : first(r);
    });
    a.rounded = h.output<floatX>("rounded", a.N, 1, 0, [=](Expected &row, long long r) {
        row.value[0] = first(r) * (1 + A_LITTLE);
        if (r % 3 == 0) row.slack[0] = SLACK;
        if (r % 3 == 1) row.either_neighbour = true;
    });
    a.total = h.output<floatX>(
        "total", a.N, 1, 0,
        [=](Expected &row, long long r) {
            row.value[0] = (a.overwrite ? 0 : (float)initial[r]) + (a.overwrite || r % 2 == 0 ? first(r) : 0);
        },
        a.overwrite ? nullptr : &initial, h.options.flag("--used-up"));
    a.workspace = (char *)h.workspace(SCRATCH);
    a.no_workspace = (char *)h.workspace(0);
    h.job.skip = [](int version) {
        const char *skipped = getenv("PLANTED_SKIP");
        return skipped && strstr(skipped, (" " + std::to_string(version) + " ").c_str()) ? "it is not to \"run\"" : "";
    };
    if (a.overwrite && h.options.flag("--used-up")) refuse(EXIT_BAD_INPUT, "--used-up: not with --overwrite");
    if (a.overwrite && h.options.choice("--grad-dtype") == "fp32") {
        refuse(EXIT_BAD_INPUT, "--overwrite: not with --grad-dtype fp32");
    }
    h.job.bytes = (h.options.flag("--targets") ? 0.0 : (double)h.distinct_tokens()) + h.options.number("--more-bytes");
    h.job.flops = (h.options.choice("--grad-dtype") == "fp32") + h.options.number("--more-flops");
    if (sweeps) {
        floatX *const copy = (floatX *)h.input(values, a.N * C);
        h.job.sweep = {"--note", {"one", "the other"}};
        h.job.figures = [](int version, int setting) -> std::vector<Figure> {
            return {{"twice", 2.0 * setting, setting > 0 ? "twice as much" : "", "twice it"},
                    {"version_again", (double)version, ""}};
        };
        h.job.baseline = {"copies", [=](cudaStream_t stream) {
                          return cudaMemcpyAsync(copy, a.inp, a.N * C * sizeof(floatX), cudaMemcpyDeviceToDevice,
                                                 stream);
                      }};
        h.job.tune = [=](int, cudaStream_t stream) {
            rows_kernel<floatX><<<ceil_div(a.N, 256LL), 256, 0, stream>>>(a, true);
        };
    }
    dump(".ids", ids, a.N * sizeof(int));
    dump(".inp", a.inp, a.N * C * sizeof(floatX));
    const char *const sleep_ms = getenv("PLANTED_SLEEP_MS");
    h.race(planted_versions<floatX>, [=](Planted<floatX> launch, int block_size, cudaStream_t stream) {
        if (sleep_ms) std::this_thread::sleep_for(std::chrono::milliseconds(atoi(sleep_ms)));
        return launch(a, sweeps ? 256 : block_size, stream);
    });
    dump(".total", a.total, a.N * sizeof(floatX));
}

int main(int argc, char **argv) {
    if (getenv("PLANTED_ULPS")) return answer_ulps();
    Harness h("planted", "faults for the harness to find",
              {{'b', "B", 2, 2}, {'t', "T", 64, 64}, {'c', "C", 40, 40}, {'v', "V", 100, 100}, {'p', "P", 1, 1}},
              {{"--grad-dtype", {"same", "fp32"}, "changes only the reported operations"},
               {"--overwrite", {}, "the total is not added to"},
               {"--used-up", {}, "the total is restored before each cold run"},
               {"--targets", {}, "ids are targets, of which every third is ignore_index"}},
              {{"--more-bytes", 0, -10.5, 1e6, "changes only the reported bytes"},
               {"--more-flops", 2, 0, 100, "changes only the reported operations", true}},
              {{"--note", "none", "changes nothing"}});
    h.options.has_block_size = getenv("PLANTED_SWEEP") == nullptr;
    return h.main(argc, argv, planted_versions<float>, planted_race<float>, planted_race<half>,
                  planted_race<__nv_bfloat16>);
}
