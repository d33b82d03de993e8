"""The parts of benchmarks/training_study.py: text, model, attentions, one training run, judgement, report."""
