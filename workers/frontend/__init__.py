"""From an uploaded model file to Relax with every shape bound."""
