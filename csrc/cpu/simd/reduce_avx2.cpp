#define COLLX_SIMD_LEVEL avx2
#include "at_level.h"
#include "reduce_template.h"
