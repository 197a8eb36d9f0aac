"""Words, rows and bytes: what is tuned, for what, with what result. Knows neither HTTP nor TVM."""
