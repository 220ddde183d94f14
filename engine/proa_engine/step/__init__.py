"""One step on a rank: batch, inputs, graphs, model runner, sampler."""
