/* quantized.c - block formats: checks arguments, divides calls into tiles for the pool, and encodes scales, which are few. */

#include <errno.h>
#include <float.h>
#include <pthread.h>

#include "fp_environment.h"
#include "isa.h"
#include "pool.h"
#include "refuse.h"

enum {
    LARGEST_TILE = 1 << 15, /* elements; a multiple of OPT_SQUARE_BLOCK, which is one of each block */
    GROUPS = 64,            /* of scales in the largest tile */
    FEW_GROUPS = 8,         /* and in the smallest */
    PANELS = 24,  /* rows: a tile of the product in bfloat16 has whole panels of 8 and strips of 3 */
    STRIPS = 128, /* columns: a tile of the transposed product has whole panels */
    MIDDLE = 127, /* the code of 0 in the dynamic map */
};

const float opt_nf4[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

const float opt_nf4_midpoints[15] = {
    -0.8480963706970215f,  -0.6106328964233398f,  -0.4599952697753906f,   -0.33967941999435425f,
    -0.23460739850997925f, -0.13791173696517944f, -0.045525018125772476f, 0.03979014977812767f,
    0.120255246758461f,    0.2035212516784668f,   0.2920137643814087f,    0.3893125355243683f,
    0.5016634464263916f,   0.6427869200706482f,   0.8614784479141235f,
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static float dynamic_map[256]; /* only fill_map() writes it, under `once`; later it is constant */

/* Not inlined: the compiler may move arithmetic across a change of the environment, but not a call. */
static __attribute__((noinline)) double map_value(int k)
{
    int i = 0, n = 1;
    double tens = 20e6;

    for (; 2 * n <= k; n *= 2, i++)
        tens /= 10;
    return (2 * n + 18 * (k - n) + 9) / (tens * n); /* one rounding: both are whole numbers */
}

static void fill_map(void)
{
    fp_environment saved = fp_enter_default();

    for (int k = 1; k <= MIDDLE; k++) {
        dynamic_map[MIDDLE + k] = (float)map_value(k);
        dynamic_map[MIDDLE - k] = -dynamic_map[MIDDLE + k];
    }
    dynamic_map[255] = 1;
    fp_restore(saved);
}

const float *opt_dynamic_map(void)
{
    pthread_once(&once, fill_map);
    return dynamic_map;
}

static int is_format(int format) { return format >= OPT_NF4 && format <= OPT_FP8; }
static int is_dtype(int dtype) { return dtype >= OPT_FP32 && dtype <= OPT_FP16; }

static int is_block(int64_t block)
{
    return block >= OPT_MIN_BLOCK && block <= OPT_MAX_BLOCK && !(block & (block - 1));
}

static int is_address(intptr_t address, size_t alignment)
{
    return address > 0 && address % (intptr_t)alignment == 0;
}

static int is_count(int64_t numel) { return numel >= 0 && numel <= INT64_MAX / 16; }

#define ADDRESS_RULE " must be the address of memory aligned to its element"
#define COUNT_RULE " must be a count, 0 or more"
#define BLOCK_RULE "block must be a power of two from 32 to 4096"
#define FORMAT_RULE "format must be NF4, INT8 or FP8"
#define DTYPE_RULE " must be FP32, BF16 or FP16"

/* Encoding. */

struct quantize_run {
    const struct opt_kernels *kernels;
    uint8_t *codes;
    float *scales;
    const char *src;
    uint64_t numel, block;
    int format, src_dtype;
};

static void quantize_tile(void *context, uint64_t begin, uint64_t end)
{
    const struct quantize_run *run = context;

    run->kernels->quantize(
        run->format, run->codes + opt_code_bytes(run->format, begin), run->scales + begin / run->block,
        run->src + begin * opt_element_size(run->src_dtype), run->src_dtype, end - begin, run->block);
}

int opt_quantize(int format, intptr_t codes, intptr_t scales, intptr_t src, int src_dtype, int64_t numel,
                 int64_t block)
{
    if (!is_format(format))
        return opt_refuse(FORMAT_RULE);
    if (!is_dtype(src_dtype))
        return opt_refuse("src_dtype" DTYPE_RULE);
    if (!is_block(block))
        return opt_refuse(BLOCK_RULE);
    if (!is_count(numel) || numel % block)
        return opt_refuse("numel must be a multiple of block, 0 or more");
    if (numel && !is_address(codes, 1))
        return opt_refuse("codes" ADDRESS_RULE);
    if (numel && !is_address(scales, sizeof(float)))
        return opt_refuse("scales" ADDRESS_RULE);
    if (numel && !is_address(src, opt_element_size(src_dtype)))
        return opt_refuse("src" ADDRESS_RULE);

    struct quantize_run run = {
        opt_selected(),  (uint8_t *)codes, (float *)scales, (const char *)src,
        (uint64_t)numel, (uint64_t)block,  format,          src_dtype,
    };
    if (!run.kernels)
        return -ENOTSUP;
    opt_pool_run(quantize_tile, &run, run.numel, OPT_SQUARE_BLOCK, LARGEST_TILE);
    return 0;
}

struct scales_run {
    uint8_t *codes;
    float *group_scales, *offset;
    const float *scales;
    uint64_t count;
};

/* A run with a single tile: the sum has one order. */
static void offset_tile(void *context, uint64_t begin, uint64_t end)
{
    const struct scales_run *run = context;
    double sum = 0;

    (void)begin;
    (void)end;
    for (uint64_t i = 0; i < run->count; i++)
        sum += run->scales[i];
    float offset = (float)(sum / (double)run->count);
    /* Hardware selects sign and payload of a NaN. */
    *run->offset = offset != offset ? __builtin_nanf("") : offset;
}

/* The number of midpoints of the map that are less than c. */
static uint8_t nearest_code(const float *map, float c)
{
    int code = 0;

    for (int step = 128; step; step /= 2)
        if (code + step < 256 && (map[code + step - 1] + map[code + step]) / 2 < c)
            code += step;
    return (uint8_t)code;
}

static void encode_group(const struct scales_run *run, uint64_t group)
{
    const float *map = opt_dynamic_map(), offset = *run->offset;
    uint64_t begin = group * OPT_SCALE_GROUP, left = run->count - begin;
    uint64_t n = left < OPT_SCALE_GROUP ? left : OPT_SCALE_GROUP;
    float most = 0;
    int finite = 1;

    for (uint64_t i = begin; i < begin + n; i++) {
        float distance = __builtin_fabsf(run->scales[i] - offset);
        finite &= distance <= FLT_MAX;
        most = distance > most ? distance : most;
    }
    if (!finite) /* then the offset is not finite either, and no scale will be */
        most = 0;
    run->group_scales[group] = most;
    for (uint64_t i = begin; i < begin + n; i++)
        run->codes[i] = most > 0 ? nearest_code(map, (run->scales[i] - offset) / most) : MIDDLE;
}

static void scales_tile(void *context, uint64_t begin, uint64_t end)
{
    const struct scales_run *run = context;

    for (uint64_t group = begin; group < end; group++)
        encode_group(run, group);
}

int opt_quantize_scales(intptr_t codes, intptr_t group_scales, intptr_t offset, intptr_t scales,
                        int64_t count)
{
    if (!is_count(count))
        return opt_refuse("count" COUNT_RULE);
    if (count && !is_address(codes, 1))
        return opt_refuse("codes" ADDRESS_RULE);
    if (count && !is_address(group_scales, sizeof(float)))
        return opt_refuse("group_scales" ADDRESS_RULE);
    if (!is_address(offset, sizeof(float)))
        return opt_refuse("offset" ADDRESS_RULE);
    if (count && !is_address(scales, sizeof(float)))
        return opt_refuse("scales" ADDRESS_RULE);

    struct scales_run run = {(uint8_t *)codes, (float *)group_scales, (float *)offset, (const float *)scales,
                             (uint64_t)count};
    uint64_t groups = (run.count + OPT_SCALE_GROUP - 1) / OPT_SCALE_GROUP;
    *run.offset = 0;
    if (!run.count)
        return 0;
    opt_pool_run(offset_tile, &run, 1, 1, 1);
    opt_pool_run(scales_tile, &run, groups, FEW_GROUPS, GROUPS);
    return 0;
}

/* Matrices. */

int opt_matrix_init(opt_matrix *matrix, int format, int64_t rows, int64_t columns, int64_t block,
                    intptr_t codes, intptr_t scales, intptr_t group_scales, intptr_t offset)
{
    if (!is_format(format))
        return opt_refuse(FORMAT_RULE);
    if (!is_block(block))
        return opt_refuse(BLOCK_RULE);
    if (!is_count(columns) || columns % block)
        return opt_refuse("columns must be a multiple of block, 0 or more");
    if (!is_count(rows) || (columns && rows > INT64_MAX / 16 / columns))
        return opt_refuse("rows" COUNT_RULE);
    if (rows && columns && !is_address(codes, 1))
        return opt_refuse("codes" ADDRESS_RULE);
    if (rows && columns && !is_address(scales, group_scales ? 1 : sizeof(float)))
        return opt_refuse("scales" ADDRESS_RULE);
    if (group_scales && !is_address(group_scales, sizeof(float)))
        return opt_refuse("group_scales" ADDRESS_RULE ", or 0");
    if (group_scales && !is_address(offset, sizeof(float)))
        return opt_refuse("offset" ADDRESS_RULE);

    *matrix = (opt_matrix){
        .codes = (const uint8_t *)codes,
        .scales = group_scales ? NULL : (const float *)scales,
        .scale_codes = group_scales ? (const uint8_t *)scales : NULL,
        .group_scales = (const float *)group_scales,
        .offset = (const float *)offset,
        .rows = (uint64_t)rows,
        .columns = (uint64_t)columns,
        .block = (uint64_t)block,
        .format = format,
    };
    return 0;
}

/* The rows of about so many elements. */
static uint64_t rows_of(uint64_t elements, uint64_t columns)
{
    return !columns ? elements : columns < elements ? elements / columns : 1;
}

/* Run a function over rows, or over columns of so many rows, in tiles of a multiple of `panel`. */
static void run_over_rows(opt_range_function function, void *context, uint64_t rows, uint64_t columns,
                          uint64_t panel)
{
    uint64_t unit = (rows_of(OPT_SQUARE_BLOCK, columns) + panel - 1) / panel * panel;
    uint64_t most = rows_of(LARGEST_TILE, columns) / unit * unit;

    opt_pool_run(function, context, rows, unit, most > unit ? most : unit);
}

struct dequantize_run {
    const struct opt_kernels *kernels;
    struct opt_part part;
};

static void dequantize_tile(void *context, uint64_t begin, uint64_t end)
{
    const struct dequantize_run *run = context;

    run->kernels->dequantize(&run->part, begin, end);
}

int opt_dequantize(intptr_t dst, int dst_dtype, const opt_matrix *matrix, int64_t first_row, int64_t rows,
                   int64_t first_column, int64_t columns)
{
    if (!is_dtype(dst_dtype))
        return opt_refuse("dst_dtype" DTYPE_RULE);
    if (first_row < 0 || (uint64_t)first_row > matrix->rows)
        return opt_refuse("first_row must be a row of the matrix");
    if (rows < 0 || (uint64_t)rows > matrix->rows - (uint64_t)first_row)
        return opt_refuse("rows must be a count of rows of the matrix");
    if (first_column < 0 || (uint64_t)first_column > matrix->columns ||
        (uint64_t)first_column % matrix->block)
        return opt_refuse("first_column must be a multiple of block in the matrix");
    if (columns < 0 || (uint64_t)columns > matrix->columns - (uint64_t)first_column ||
        (uint64_t)columns % matrix->block)
        return opt_refuse("columns must be a multiple of block in the matrix");
    if (!rows || !columns)
        return 0;
    if (!is_address(dst, opt_element_size(dst_dtype)))
        return opt_refuse("dst" ADDRESS_RULE);

    struct dequantize_run run = {
        opt_selected(),
        {
            .matrix = matrix,
            .first_row = (uint64_t)first_row,
            .rows = (uint64_t)rows,
            .first_column = (uint64_t)first_column,
            .columns = (uint64_t)columns,
            .dst = (char *)dst,
            .dst_dtype = dst_dtype,
        },
    };
    if (!run.kernels)
        return -ENOTSUP;
    run_over_rows(dequantize_tile, &run, run.part.rows, run.part.columns, 1);
    return 0;
}

struct product_run {
    opt_product_function *function;
    struct opt_product product;
};

static void product_tile(void *context, uint64_t begin, uint64_t end)
{
    const struct product_run *run = context;

    run->function(&run->product, begin, end);
}

/* The bits of 2^exponent as float32. */
static float power_of_two(int exponent)
{
    uint32_t bits = (uint32_t)(exponent + 127) << 23;
    float power;

    memcpy(&power, &bits, sizeof power);
    return power;
}

/* See struct opt_product. If |x| >= 2^a and |w| >= 2^b, x * w is a multiple of 2^(a + b - 14), because a bfloat16 has
 * eight places; this must be 2^-126 at least. A value of a code is 0, or at least 2^-9 (FP8). w must not be subnormal. */
static float least_scale(const uint16_t *x, uint64_t numel)
{
    uint16_t least = UINT16_MAX;

    for (uint64_t i = 0; i < numel; i++) {
        uint16_t order = (uint16_t)(2 * x[i] - 1); /* that of the magnitudes, but 0 is the last */
        least = order < least ? order : least;
    }
    /* With the bias of 127: 0 if subnormal; that of infinity at most, or one more. */
    int exponent = (least + 1) / 2 >> 7;

    if (!exponent)
        return __builtin_inff();
    return power_of_two(exponent > 141 ? -117 : 24 - exponent);
}

/* The product with x and y in float32 or bfloat16; `transposed` in bfloat16 only. */
static int multiply(intptr_t y, intptr_t x, int dtype, int64_t rows, const opt_matrix *matrix, int transposed)
{
    const uint64_t outputs = transposed ? matrix->columns : matrix->rows;
    const uint64_t inputs = transposed ? matrix->rows : matrix->columns;

    if (!is_count(rows))
        return opt_refuse("rows" COUNT_RULE);
    if (!rows || !outputs)
        return 0;
    if (!is_address(y, opt_element_size(dtype)))
        return opt_refuse("y" ADDRESS_RULE);
    if (inputs && !is_address(x, opt_element_size(dtype)))
        return opt_refuse("x" ADDRESS_RULE);

    const struct opt_kernels *kernels = opt_selected();
    if (!kernels)
        return -ENOTSUP;
    struct product_run run = {
        kernels->product,
        {.matrix = matrix, .x = (const void *)x, .y = (void *)y, .x_rows = (uint64_t)rows},
    };
    if (dtype == OPT_BF16) {
        run.function = transposed ? kernels->transposed_bf16 : kernels->product_bf16;
        run.product.least_scale = least_scale(run.product.x, (uint64_t)rows * inputs);
    }
    run_over_rows(product_tile, &run, outputs, inputs, transposed ? STRIPS : dtype == OPT_BF16 ? PANELS : 1);
    return 0;
}

int opt_quantized_product(intptr_t y, intptr_t x, int64_t rows, const opt_matrix *matrix)
{
    return multiply(y, x, OPT_FP32, rows, matrix, 0);
}

int opt_quantized_product_bf16(intptr_t y, intptr_t x, int64_t rows, const opt_matrix *matrix)
{
    return multiply(y, x, OPT_BF16, rows, matrix, 0);
}

int opt_quantized_transposed_product_bf16(intptr_t y, intptr_t x, int64_t rows, const opt_matrix *matrix)
{
    return multiply(y, x, OPT_BF16, rows, matrix, 1);
}
