#define COLLX_SIMD_LEVEL portable
#include "at_level.h"
#include "expression_template.h"
