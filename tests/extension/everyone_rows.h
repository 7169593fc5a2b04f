// What a new collective adds to the tables: a row of protocol/collectives.h. Every rank reduces the
// messages of all: a reduce to each of them at once. Included before every source of the build that
// has it.
#pragma once

#define COLLX_EXTRA_COLLECTIVES \
  {.collective = Collective::count, .name = "reduce_to_everyone", .reduces = true},
/// What tests of the kernels expect of it.
#define COLLX_EXTRA_MEANS_ALLREDUCE case Collective::count:
