"""What is looked at in a training set-up besides attention itself; `docs/guard.md` lists what is found."""
