/* simt.h - what a C++ compiler needs to take zero3/device/kernels/kernels.cu, for the tests where no GPU is: the words
 * of CUDA that are in it, with IEEE's arithmetic (build with -ffp-contract=off).
 *
 * A kernel's threads run one after the other. Those of a kernel that shuffles are threads indeed, warp by warp, and
 * meet at every shuffle: a lane that did not would hang, as on a GPU.
 */
#include <barrier>
#include <cmath>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#define __global__ static
#define __device__ static inline
#define __launch_bounds__(threads)

struct Index {
    unsigned x;
};

struct Warp {
    std::barrier<> all{32};
    double values[32];
};

static thread_local Index blockIdx, threadIdx;
static thread_local Warp *warp;

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }

static inline unsigned __float_as_uint(float x)
{
    unsigned bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float __uint_as_float(unsigned bits)
{
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

static inline double __shfl_down_sync(unsigned lanes, double value, int by)
{
    unsigned lane = threadIdx.x % 32, from = lane + by;

    if (lanes != 0xFFFFFFFF)
        std::abort();
    warp->values[lane] = value;
    warp->all.arrive_and_wait();
    double found = from < 32 ? warp->values[from] : value;
    warp->all.arrive_and_wait();
    return found;
}

static void run_in_turn(unsigned blocks, unsigned threads, const std::function<void()> &kernel)
{
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            kernel();
}

static void run_by_warps(unsigned blocks, unsigned threads, const std::function<void()> &kernel)
{
    for (unsigned first = 0; first < blocks * threads; first += 32) {
        Warp shared;
        std::vector<std::thread> lanes;
        for (unsigned lane = 0; lane < 32; lane++)
            lanes.emplace_back([&, lane] {
                blockIdx.x = first / threads, threadIdx.x = first % threads + lane, warp = &shared;
                kernel();
            });
        for (std::thread &lane : lanes)
            lane.join();
    }
}
