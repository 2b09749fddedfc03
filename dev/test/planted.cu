/*
Kernels that are wrong on purpose, to see the harness find them: out (N, C) is inp (N, C), save that out[0,0] is NaN and
out[0,1] is infinite; first (N) is the first column of inp, in float. N = B*T; C is 2 at least.

Version 1 and the last are right; what the others get wrong is in the table. With PLANTED_DUMP=FILE in the environment,
the ids and the inputs as they are on the device are written to FILE.ids (int32) and FILE.inp (the element type).
*/
#include "../harness.h"

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
};

template <typename floatX>
__global__ void copy_kernel(floatX *out, float *first, const floatX *inp, long long N, int C, long long count) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    out[i] = i == 0 ? quiet_nan<floatX>() : i == 1 ? (floatX)INFINITY : inp[i];
    if (i % C == 0) first[i / C] = (float)inp[i];
    if (count < N * C && i == 0) first[N - 1] = (float)inp[(N - 1) * C];  // C may be all that is left out
}

// Moves a number in [-1, 1) by that many ulps of its type, away from 0.
template <typename floatX>
__global__ void move_kernel(floatX *element, int ulps) {
    typename Bits<sizeof(floatX) == 2 ? 2 : 4>::type bits;
    memcpy(&bits, element, sizeof(floatX));
    bits += ulps;
    memcpy(element, &bits, sizeof(floatX));
}

template <typename T>
__global__ void set_kernel(T *element, T value) {
    *element = value;
}

template <typename floatX>
using Planted = cudaError_t (*)(floatX *out, float *first, const floatX *inp, status_word *status, long long N, int C,
                                int block_size, cudaStream_t stream);

template <typename floatX, Fault fault>
cudaError_t planted(floatX *out, float *first, const floatX *inp, status_word *status, long long N, int C,
                    int block_size, cudaStream_t stream) {
    static int calls = 0;
    if (fault == NOTHING || (fault == NOTHING_THE_SECOND_TIME && ++calls == 2)) return cudaSuccess;
    if (fault == LAUNCH_ERROR) block_size = 2048;
    const long long count = N * C - (fault == LAST_UNWRITTEN);
    const unsigned grid_size = ceil_div(N * C, (long long)block_size);
    copy_kernel<floatX><<<grid_size, block_size, 0, stream>>>(out, first, inp, N, C, count);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;

    const long long victim = N * C - 1 - C / 2;
    const int ulps = fault == ONE_ULP ? 1 : fault == TWO_ULPS || (fault == AT_1024 && block_size == 1024) ? 2 : 0;
    if (ulps > 0) move_kernel<floatX><<<1, 1, 0, stream>>>(out + victim, ulps);
    const auto set = [&](auto *element, auto value) {
        set_kernel<decltype(value)><<<1, 1, 0, stream>>>(element, value);
    };
    const floatX one = (floatX)1.0f;
    if (fault == PAST_THE_END) set(out + N * C, one);
    if (fault == FAR_PAST_THE_END) set((char *)(out + N * C) + 65535, (char)0);
    if (fault == BEFORE_THE_BEGINNING) set(out - 1, one);
    if (fault == A_NAN) set(out + victim, (floatX)NAN);
    if (fault == AN_INFINITY) set(out + victim, (floatX)-INFINITY);
    if (fault == NO_NAN) set(out, one);
    if (fault == NO_INFINITY) set(out + 1, (floatX)-INFINITY);
    if (fault == SECOND_OUTPUT) set(first + N - 1, 2.0f);
    if (fault == BAD_ID) set(status, (status_word)5);
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
};

static void dump(const std::string &suffix, const void *device, size_t size) {
    const char *path = getenv("PLANTED_DUMP");
    if (!path) return;
    std::vector<char> host(size);
    cudaCheck(cudaMemcpy(host.data(), device, size, cudaMemcpyDeviceToHost));
    FILE *file = fopen((path + suffix).c_str(), "wb");
    if (!file || fwrite(host.data(), 1, size, file) != size || fclose(file) != 0) abort();
}

template <typename floatX>
void planted_race(Harness &h) {
    const long long N = (long long)h.dim('b') * h.dim('t');
    const int C = h.dim('c');
    const int *ids = h.tokens(N, h.dim('v'));
    const Values<floatX> values = {h.dim('p'), h.seed};
    const floatX *inp = h.input(values, N * C);
    status_word *status = h.status();
    floatX *out = h.output<floatX>("out", N, C, 1, [=](double *row, long long r) {
        for (int c = 0; c < C; c++) row[c] = (double)(float)values[r * C + c];
        if (r == 0) row[0] = NAN, row[1] = INFINITY;
    });
    float *first = h.output<float>("first", N, 1, 1, [=](double *row, long long r) { row[0] = (float)values[r * C]; });
    h.bytes = (double)h.distinct_tokens();
    h.flops = 0;
    dump(".ids", ids, N * sizeof(int));
    dump(".inp", inp, N * C * sizeof(floatX));
    h.race(planted_versions<floatX>, [=](Planted<floatX> launch, int block_size, cudaStream_t stream) {
        return launch(out, first, inp, status, N, C, block_size, stream);
    });
}

int main(int argc, char **argv) {
    Harness h("planted", "faults for the harness to find",
              {{'b', "B", 2, 2}, {'t', "T", 64, 64}, {'c', "C", 40, 40}, {'v', "V", 100, 100}, {'p', "P", 1, 1}});
    return h.main(argc, argv, planted_versions<float>, planted_race<float>, planted_race<half>,
                  planted_race<__nv_bfloat16>);
}
