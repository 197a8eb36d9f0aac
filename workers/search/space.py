"""Where candidates come from: a space generator and how it is sampled and evolved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.s_tir import meta_schedule as ms


@dataclass(frozen=True, slots=True)
class Space:
    """A named space of schedules with the sizes of its evolution.

    Populations are far smaller than MetaSchedule's (512 and 4 generations): evolving, not measuring, is what a search
    of a few hundred trials waits for.
    """

    generator: str = "post-order-apply"  #: sketches, as in Ansor
    population: int = 48
    generations: int = 2
    parents: int = 16  #: best measured candidates that are bred from

    def strategy(self, count: int, *, guided: bool) -> Any:
        """Evolution when there is a model to guide it, else one random sample for each candidate wanted."""
        if not guided:
            return ms.search_strategy.EvolutionarySearch(
                population_size=2 * count,
                init_measured_ratio=0.0,
                init_min_unmeasured=count,
                genetic_num_iters=0,
                eps_greedy=0.0,
            )
        return ms.search_strategy.EvolutionarySearch(
            population_size=self.population,
            init_measured_ratio=0.2,
            init_min_unmeasured=self.population // 2,
            genetic_num_iters=self.generations,
            genetic_mutate_prob=0.85,
            eps_greedy=0.1,
        )
