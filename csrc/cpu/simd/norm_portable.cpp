#define COLLX_SIMD_LEVEL portable
#include "at_level.h"
#include "norm_template.h"
