#define COLLX_SIMD_LEVEL avx512
#include "at_level.h"
#include "norm_template.h"
