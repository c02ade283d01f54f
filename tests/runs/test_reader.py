from finetune.runs.metrics import MetricsWriter
from finetune.runs.metrics_reader import MetricsReader
from tests.runs.made_runs import step_figures


def steps_of(events):
    return [event["step"] for event in events]


def test_each_look_gives_what_is_new(tmp_path):
    reader = MetricsReader(tmp_path / "metrics.jsonl")
    assert reader.read() == (False, [])
    with MetricsWriter(reader.path) as metrics:
        metrics.write("step", **step_figures(1, 2.0))
        metrics.write("step", **step_figures(2, 2.0))
        assert steps_of(reader.read()[1]) == [1, 2]
        assert reader.read() == (False, [])
        metrics.write("step", **step_figures(3, 2.0))
        assert steps_of(reader.read()[1]) == [3]


def test_a_line_counts_once_it_is_whole(tmp_path):
    reader = MetricsReader(tmp_path / "metrics.jsonl")
    reader.path.write_text('{"event": "step", "step": 1}\n{"event": "st')
    assert steps_of(reader.read()[1]) == [1]
    with reader.path.open("a") as file:
        file.write('ep", "step": 2}')
        file.flush()
        assert reader.read() == (False, [])
        file.write("\n")
    assert steps_of(reader.read()[1]) == [2]


def test_a_restart_that_cut_lines_is_noticed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    metrics = MetricsWriter(path)
    for step in range(1, 6):
        metrics.write("step", **step_figures(step, 2.0))
    reader.read()
    metrics.cut_behind(3)
    assert reader.read()[0] is True
    for step in range(4, 9):  # longer than it was
        metrics.write("step", **step_figures(step, 1.0))
    is_new, events = reader.read()
    assert (is_new, steps_of(events)) == (False, [4, 5, 6, 7, 8])
    metrics.cut_behind(7)
    metrics.write("step", **step_figures(8, 0.5))
    is_new, events = reader.read()
    assert (is_new, steps_of(events)) == (True, list(range(1, 9)))
    assert events[-1]["loss"] == 0.5
    metrics.close()


def test_a_file_that_was_cut_in_place_is_read_again(tmp_path):
    reader = MetricsReader(tmp_path / "metrics.jsonl")
    reader.path.write_text('{"event": "step", "step": 1}\n' * 3)
    reader.read()
    reader.path.write_text('{"event": "step", "step": 1}\n')
    assert reader.read() == (True, [{"event": "step", "step": 1}])
