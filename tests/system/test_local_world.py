"""local_world: how many processes share this machine, by what each launcher puts into their environment."""

import pytest

testing = pytest.importorskip("torchoffload._C_testing", reason="it is reached through the test build alone").testing

# From the launcher nearest to the process outwards.
VARIABLES = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PMI_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
)


def test_a_process_that_nobody_launched_is_alone():
    assert testing.local_world_size({}) == 1


@pytest.mark.parametrize("variable", VARIABLES)
def test_each_launcher_tells_it(variable):
    assert testing.local_world_size({variable: "4"}) == 4
    assert testing.local_world_size({variable: " 6\n"}) == 6


@pytest.mark.parametrize("number", range(len(VARIABLES)))
def test_the_launcher_nearest_to_the_process_is_believed(number):
    """A torchrun that mpirun started, one on each node, tells each of its processes how many it has."""
    outer = dict.fromkeys(VARIABLES[number + 1 :], "1")
    assert testing.local_world_size({VARIABLES[number]: "8"} | outer) == 8


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("value", ["", "0", "-2", "many", "4 5", "0x8", "1e3", "4194305", "9" * 30, "4.0", "+4"])
def test_what_cannot_be_true_is_passed_over(variable, value):
    assert testing.local_world_size({variable: value}) == 1
    if variable != VARIABLES[-1]:
        assert testing.local_world_size({variable: value, VARIABLES[-1]: "3"}) == 3


@pytest.mark.parametrize(
    ("text", "node", "count"),
    [
        ("4", 0, 4),
        ("4(x2),3", 0, 4),
        ("4(x2),3", 1, 4),
        ("4(x2),3", 2, 3),
        ("2,4(x3),1(x2)", 0, 2),
        ("2,4(x3),1(x2)", 3, 4),
        ("2,4(x3),1(x2)", 5, 1),
        # The largest, where the node is not known.
        ("2,4(x3),1(x2)", 6, 4),
        ("2,4(x3),1(x2)", None, 4),
        ("4(x4194304),2", 4194304, 2),
        ("", 0, None),
        ("4,", 0, None),
        (",4", 0, None),
        ("4(x2", 0, None),
        ("4(x)", 0, None),
        ("4(x0)", 0, None),
        ("4(2)", 0, None),
        ("(x2)", 0, None),
        ("4(x2)3", 0, None),
        ("0", 0, None),
        ("4,0", 0, None),
    ],
)
def test_slurm_writes_one_number_for_each_run_of_nodes(text, node, count):
    assert testing.parse_tasks_per_node(text, node) == count


@pytest.mark.parametrize(
    ("node", "count"), [("0", 4), ("1", 4), ("2", 3), (None, 4), ("-1", 4), ("login", 4), ("7", 4)]
)
def test_a_step_of_slurm_tells_the_tasks_of_each_of_its_nodes(node, count):
    variables = {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}
    if node is not None:
        variables["SLURM_NODEID"] = node
    assert testing.local_world_size(variables) == count


def test_a_batch_script_of_slurm_is_alone():
    """It sees what the job asked for, and no step of its own: it is one process until it calls srun."""
    batch = {"SLURM_NTASKS_PER_NODE": "8", "SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_NTASKS": "16", "SLURM_NODEID": "0"}
    assert testing.local_world_size(batch) == 1


def test_the_environment_of_this_process_is_read(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert testing.local_world_size() == 1
    monkeypatch.setenv("MPI_LOCALNRANKS", "5")
    assert testing.local_world_size() == 5
