"""The load generator behind `slipstream bench`, and the result schema that benchmarks/ share with it."""
