"""The variables that launchers were seen to set, less those that say nothing about processes."""


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


# torchrun of torch 2.13, --nnodes 2 --nproc_per_node 2 --rdzv-backend c10d --rdzv-id lab; address and port are made up.
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "lab",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
# `accelerate launch` 1.15 without any option, or with every value at its default.
ACCELERATE_DEFAULTS = {
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_CPU": "False",
}
ACCELERATE = {**TORCHRUN, **ACCELERATE_DEFAULTS, "TORCHELASTIC_RUN_ID": "none"}
# mpirun of Open MPI 4.1.4 (its PMIX_VERSION 4.2.2rc2), `--oversubscribe -n 2 env`, as for rank 3 of 4 on two nodes.
OPEN_MPI = {
    "OMPI_APP_CTX_NUM_PROCS": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_ess_base_jobid": "420937729",
    "OMPI_MCA_ess_base_vpid": "3",
    "OMPI_MCA_orte_ess_num_procs": "4",
    "OMPI_UNIVERSE_SIZE": "4",
    "PMIX_NAMESPACE": "420937729",
    "PMIX_RANK": "3",
}
# mpiexec.hydra of MPICH 4.0.2, `-n 2 env`; Intel MPI's sets the same four.
HYDRA = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "8",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
# MVAPICH's mpirun_rsh, from its manual: not seen.
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
# The shell of `srun --pty bash`, or any step of one task.
SRUN_ONE_TASK = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
# srun of Slurm 22.05.8 on two nodes.
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "2",
    "SLURM_STEPID": "2",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}
# The body of `sbatch -N1 --ntasks=2`, Slurm 22.05.8: a rank, but no step.
BATCH_BODY = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_NPROCS": "2",
    "SLURM_NNODES": "1",
    "SLURM_TASKS_PER_NODE": "2",
    "SLURM_JOB_NODELIST": "n1",
}
# The shell of `salloc -N1 -n2`, Slurm 22.05.8: no rank either.
SALLOC_SHELL = without(BATCH_BODY, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
# `srun --mpi=pmi2 -n2` there: PMI, but no local rank of its own.
SRUN_PMI2 = {
    **BATCH_BODY,
    "PMI_FD": "13",
    "PMI_JOBID": "77.0",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "SLURM_LOCALID": "1",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
# What either mpirun leaves of Slurm there: the step of one task per node that starts its daemons.
MPIRUN_STEP = {
    **BATCH_BODY,
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
