// Hopper's instructions (compute capability 9.0) for classifier_fused.cu and lm_head.cu: bulk copies to shared memory,
// and matrix products by groups of 4 warps. Requires CCCL's <cuda/ptx>.
#pragma once
#include "../common.h"

#include <cuda/ptx>

namespace bookends {

// ---------------------------------------------------------------------------------------------------------------------
// clusters and bulk copies (compute capability 9.0)

// Whether this code is compiled for devices with clusters and bulk copies.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kHasClusters = true;
#else
constexpr bool kHasClusters = false;
#endif

// Waits until the barrier (an mbarrier in shared memory) has completed its phase of this parity.
__device__ inline void wait_for_phase(uint64_t *barrier, unsigned parity) {
    while (!cuda::ptx::mbarrier_try_wait_parity(barrier, parity)) {
    }
}

// A position in a ring of slots, each with an mbarrier. `phase` is the parity of the barriers' phases in this round.
struct Ring {
    unsigned slot = 0, phase = 0;
    __device__ void next(unsigned slots) {
        if (++slot == slots) slot = 0, phase ^= 1;
    }
};

// Copies from global to shared memory. The barrier counts the bytes as they arrive. Addresses and size are multiples of
// 16 bytes. `keep`: the L2 keeps the lines longer than others (evict_last), until they are written.
__device__ inline void load_bulk(void *to, const void *from, unsigned bytes, uint64_t *barrier, bool keep) {
#ifdef __CUDA_ARCH__
    if (keep) {
        uint64_t policy;
        asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
            :
            : "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(bytes),
              "r"((unsigned)__cvta_generic_to_shared(barrier)), "l"(policy)
            : "memory");
        return;
    }
#else
    (void)keep;  // no cache hints on the CPU device
#endif
    cuda::ptx::cp_async_bulk(cuda::ptx::space_cluster, cuda::ptx::space_global, to, from, bytes, barrier);
}

// ---------------------------------------------------------------------------------------------------------------------
// matrix products by groups of 4 warps (wgmma: compute capability 9.0, code for sm_90a)

// Whether this code is compiled for sm_90a, the only target with wgmma.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHasWgmma = true;
#else
constexpr bool kHasWgmma = false;
#endif

constexpr unsigned kSwizzleBytes = 1024;  // period of the 128-byte swizzle

// The byte offset of a 16-byte chunk in rows of 128 bytes with the 128-byte swizzle: chunk i of row r is stored in
// place i ^ (r % 8) of the row. Neither the tensor cores nor the writing threads then have bank conflicts.
__device__ inline unsigned swizzled(unsigned row, unsigned chunk) { return row * 128 + (chunk ^ row % 8) * 16; }

// The wgmma matrix descriptor (see PTX) of rows of 128 bytes in shared memory: the address, a stride of 1024 bytes
// between groups of 8 rows, and the 128-byte swizzle. Adding kDescribedStep to it moves by 16 channels, 32 bytes.
__device__ inline uint64_t describe_rows(const void *begin) {
#ifdef __CUDA_ARCH__
    const uint64_t address = (__cvta_generic_to_shared(begin) & 0x3ffff) >> 4;
    // From bit 16: unused with this swizzle; from bit 32: bytes to the next 8 rows; from bit 62: the swizzle.
    return address | 1ull << 16 | (uint64_t)(kSwizzleBytes >> 4) << 32 | 1ull << 62;
#else
    return (uint64_t)begin;
#endif
}
constexpr uint64_t kDescribedStep =
#ifdef __CUDA_ARCH__
    32 >> 4;
#else
    32;
#endif

// sums (64, 256) = X W^T, or sums += X W^T: a group of 4 warps multiplies 64 rows of X by 256 rows of W over 16
// channels. A thread's sums[4j + 2h + k] belongs to row 16 * warp + lane / 4 + 8h and column 8j + lane % 4 * 2 + k. The
// operation is asynchronous: the thread must not access its sums before wgmma_wait().
template <typename floatX>
__device__ void wgmma_64x256x16(float (&sums)[128], uint64_t X, uint64_t W, bool add) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define BOOKENDS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define BOOKENDS_16(i) BOOKENDS_4(i), BOOKENDS_4(i + 4), BOOKENDS_4(i + 8), BOOKENDS_4(i + 12)
#define BOOKENDS_WGMMA(type)                                                                                   \
    asm volatile(                                                                                              \
        "{.reg .pred add; setp.ne.b32 add, %130, 0;\n"                                                         \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                                           \
        " {"                                                                                                   \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21,"  \
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41,"  \
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61,"  \
        "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81,"  \
        "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100,"      \
        "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116,"      \
        "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, add, 1, 1, 0, 0;}"     \
        : BOOKENDS_16(0), BOOKENDS_16(16), BOOKENDS_16(32), BOOKENDS_16(48), BOOKENDS_16(64), BOOKENDS_16(80), \
          BOOKENDS_16(96), BOOKENDS_16(112)                                                                    \
        : "l"(X), "l"(W), "r"((int)add))
    if constexpr (std::is_same_v<floatX, half>) {
        BOOKENDS_WGMMA("f16");
    } else {
        BOOKENDS_WGMMA("bf16");
    }
#undef BOOKENDS_WGMMA
#undef BOOKENDS_16
#undef BOOKENDS_4
#elif defined(BOOKENDS_CPU_DEVICE)
    cpu::start_wgmma([&sums, X, W, add] {
        const unsigned warp = threadIdx.x / kWarpSize % 4, lane = threadIdx.x % kWarpSize;
        float x[2][16], w[16];
        auto load = [](float(&row)[16], uint64_t begin, unsigned r) {  // applies the hardware's swizzle
            for (unsigned k = 0; k < 16; k++) {
                const uint64_t address = begin + r * 128 + k * 2;
                row[k] = (float)*(const floatX *)(address ^ (address >> 7 & 7) << 4);
            }
        };
        for (unsigned h = 0; h < 2; h++) load(x[h], X, 16 * warp + lane / 4 + 8 * h);
        for (unsigned j = 0; j < 64; j++) {
            load(w, W, 8 * (j / 2) + lane % 4 * 2 + j % 2);
            for (unsigned h = 0; h < 2; h++) {
                float &sum = sums[j / 2 * 4 + 2 * h + j % 2];
                if (!add) sum = 0;
                for (unsigned k = 0; k < 16; k++) sum += x[h][k] * w[k];
            }
        }
    });
#endif
}

// wgmma_begin() precedes a batch of wgmmas, and wgmma_end() ends it. wgmma_wait<n>() waits until all but the latest n
// batches are complete.
__device__ inline void wgmma_begin() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ inline void wgmma_end() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#elif defined(BOOKENDS_CPU_DEVICE)
    cpu::wgmma_commit();
#endif
}
template <int n>
__device__ void wgmma_wait() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
#elif defined(BOOKENDS_CPU_DEVICE)
    cpu::wgmma_wait(n);
#endif
}

// Raises (`more`) or lowers the number of registers of each thread of a group. An increase waits until other groups
// have released enough registers; if they never do, it waits forever.
template <int registers, bool more>
__device__ void set_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (more) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
    }
#endif
}

}  // namespace bookends
