#define COLLX_SIMD_LEVEL portable
#include "at_level.h"
#include "reduce_template.h"
