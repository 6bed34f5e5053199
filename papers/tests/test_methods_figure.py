"""The picture of the losses of several methods."""

import itertools

from regauge_papers.methods_figure import methods_figure


def test_many_methods_have_names_at_their_curves_and_few_to_a_panel() -> None:
    curves = {
        f"method {k}": [{"t": t / 2, "loss": 4.8 + (k + 1) * t * (2 - t) / 10} for t in range(3)] for k in range(9)
    }
    figure = methods_figure(curves, "loss")
    assert [len(axes.texts) for axes in figure.axes] == [3, 3, 3]
    assert [text.get_text() for text in figure.axes[0].texts] == ["method 6", "method 7", "method 8"]
    for axes in figure.axes:
        heights = [text.xy[1] for text in axes.texts]
        assert heights == sorted(heights)
        low, high = axes.get_ylim()
        assert low > 4.7
        assert min(b - a for a, b in itertools.pairwise(heights)) > 0.1 * (high - low), "names cover each other"
        drawn = {line.get_color() for line in axes.lines}
        assert {text.get_color() for text in axes.texts} == drawn
