"""``ElasticDDP``: data-parallel training between workers that may die and join, without servers."""
