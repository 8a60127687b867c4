"""Laws from samples: tests of draws with a stated error rate, where no exact law can be had."""
