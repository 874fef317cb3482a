"""Images with labels: how they are kept, checked, augmented and put into batches. Start with `training.data.images`."""
