// LocalWorld: how many processes of this job share this machine, as their launcher tells them.
// Ownership:     none; the environment is read anew by each call.
// Thread safety: every function, any thread, as long as none changes the environment meanwhile.
// Not handled:   processes of other jobs; several job steps of SLURM on one node.
//
// Sources: torchrun, https://docs.pytorch.org/docs/stable/elastic/run.html; DeepSpeed, launcher/launch.py; Open MPI's
// FAQ on running jobs; MVAPICH2's user guide; Hydra, which MPICH and Intel MPI start processes with, proxy code;
// srun(1), "Output environment variables".
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

namespace torchoffload {

// The value of an environment variable, or null.
using Environment = std::function<const char*(const char* name)>;

// The first of these that is set to a number which can be true, in the order from the launcher that is nearest to the
// process outwards (a torchrun is often started by srun or mpirun, and never the other way round):
//   LOCAL_WORLD_SIZE              torchrun, accelerate
//   LOCAL_SIZE                    deepspeed
//   OMPI_COMM_WORLD_LOCAL_SIZE    Open MPI's mpirun
//   MV2_COMM_WORLD_LOCAL_SIZE     MVAPICH2
//   MPI_LOCALNRANKS               Hydra's mpiexec: MPICH, Intel MPI
//   PMI_LOCAL_SIZE                other servers of MPICH's process management interface
//   SLURM_STEP_TASKS_PER_NODE     srun, with SLURM_NODEID
// 1 without any. The variables that SLURM sets for the job as a whole (SLURM_NTASKS_PER_NODE, SLURM_TASKS_PER_NODE) are
// not read: a batch script sees them too, which runs alone on its node until it calls srun. The step's variable is
// srun's own.
uint64_t local_world_size(const Environment& environment);
uint64_t local_world_size();  // of this process's environment

// SLURM's way to write one number a node: "4(x2),3" is 4, 4, 3. The number of node `node`; the largest if the node is
// not known, or not in the list, since a budget that is too small costs less than one that is too large. Absent if the
// text is written otherwise.
std::optional<uint64_t> parse_tasks_per_node(std::string_view text, std::optional<uint64_t> node);

}  // namespace torchoffload
