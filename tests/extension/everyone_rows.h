// The table row of a new collective in protocol/collectives.h. Every rank reduces the messages of
// all ranks, like a reduce to all ranks at once. Builds with the collective include this file
// before every source.
#pragma once

#define COLLX_EXTRA_COLLECTIVES \
  {.collective = Collective::count, .name = "reduce_to_everyone", .reduces = true},
/// The kernel tests expect the results of an all-reduce.
#define COLLX_EXTRA_MEANS_ALLREDUCE case Collective::count:
