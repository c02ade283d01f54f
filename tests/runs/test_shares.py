"""The recorded shares of time that training waits for data and for the slowest rank."""

import pytest

from finetune.training.reporting.events import Interval
from tests.launches import run_launched
from tests.tiny_runs import write_base, write_rows
from tests.tiny_training import events


def test_an_interval_adds_up_its_steps():
    interval = Interval()
    interval.add(seconds=2.0, num_tokens=300, data_wait_seconds=0.5, rank_seconds=(1.0, 3.0))
    interval.add(seconds=2.0, num_tokens=100, data_wait_seconds=0.5, rank_seconds=(1.0, 1.0))
    figures = interval.metrics()
    assert (figures["seconds"], figures["tokens_per_second"]) == (4.0, 100.0)
    assert figures["data_wait_share"] == 0.25
    assert figures["slowest_rank_share"] == pytest.approx(1 - 3.0 / 4.0)
    assert figures["host_memory"] > 10_000_000
    interval.add(seconds=0.1234567, num_tokens=0, data_wait_seconds=0.0)
    rounded = interval.metrics()
    assert (rounded["seconds"], rounded["tokens_per_second"], rounded["data_wait_share"]) == (4.123457, 97.0, 0.2425)


def test_what_nobody_measured_is_not_known():
    interval = Interval()
    interval.add(seconds=0.0, num_tokens=0)
    assert not {"data_wait_share", "slowest_rank_share"} & interval.metrics().keys()


SCRIPT = """
import sys, time
from finetune import *
from finetune.training.trainer import Trainer
config = load_config(sys.argv[2:])
with launch(config) as runtime:
    tokenizer = build_tokenizer(config.model)
    splits = encode_examples(load_examples(config.data), tokenizer, config.data)
    model = add_lora(build_base_model(config.model), config.lora)
    def slow(module, arguments):
        time.sleep(0.05 * (runtime.rank == 1))
    model.get_input_embeddings().register_forward_pre_hook(slow)
    trainer = Trainer(runtime, config, model, tokenizer, splits)
    train, validation, test = trainer.prepare_dataloaders()
    class Late:
        def __getattr__(self, name):
            return getattr(train, name)
        def steps(self, epoch, first):
            for share in train.steps(epoch, first):
                time.sleep(float(sys.argv[1]))
                yield share
    trainer.run_training(Late(), None)
"""


@pytest.mark.slow
@pytest.mark.warm
@pytest.mark.parametrize(("launcher", "delay"), [("python", "0.1"), ("torchrun", "0")])
def test_a_run_records_whom_it_waited_for(tmp_path, launcher, delay):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    base, rows = write_base(tmp_path / "base"), write_rows(tmp_path / "rows", validation=0, test=0)
    words = [f"model.path={base}", f"data.path={rows}", f"data.cache_dir={tmp_path / 'cache'}", "lora.r=4"]
    words += [f"output_dir={tmp_path / 'run'}", "training.batch_size=3", "training.max_steps=9", "training.log_every=3"]
    words += ["training.kernels=reference"]
    done = run_launched(launcher, [script, delay, *words])
    assert done.returncode == 0, done.stdout
    shares = events(tmp_path / "run", "resources")
    assert [event["step"] for event in shares] == [3, 6, 9]
    if launcher == "python":
        assert all(event["data_wait_share"] > 0.5 for event in shares)
        assert "slowest_rank_share" not in shares[0]
        (warning,) = events(tmp_path / "run", "warning")
        assert (warning["kind"], warning["step"]) == ("data", 6)
        assert "the data loader slows training down" in done.stdout
    else:
        assert all(event["data_wait_share"] < 0.2 for event in shares)
        assert shares[-1]["slowest_rank_share"] > 0.2, shares
