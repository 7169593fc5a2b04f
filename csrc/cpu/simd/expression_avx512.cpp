#define COLLX_SIMD_LEVEL avx512
#include "at_level.h"
#include "expression_template.h"
