import math

import pytest

from finetune.inference.evaluation import Scores


@pytest.mark.parametrize(("loss", "perplexity"), [(0.0, 1.0), (1000.0, math.inf), (math.nan, math.nan)])
def test_perplexity_of_a_loss(loss, perplexity):
    assert Scores(loss=loss, standard_error=0.0).perplexity == pytest.approx(perplexity, nan_ok=True)
