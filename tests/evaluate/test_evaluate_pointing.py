import torch

from powerclip.evaluate.pointing import cells_in_boxes, hits_cells


def heatmap(row, column, rows=4, columns=4):
    values = torch.zeros(1, rows, columns)
    values[0, row, column] = 1.0
    return values


def hits(heatmaps, boxes):
    return hits_cells(heatmaps, cells_in_boxes(boxes, heatmaps.shape[1:]))


def test_a_hit_is_the_strongest_patch_with_its_centre_in_the_box():
    box = torch.tensor([[0.5, 0.0, 1.0, 0.25]])  # right half, top row
    assert hits(heatmap(0, 2), box).tolist() == [True]
    assert hits(heatmap(0, 3), box).tolist() == [True]
    assert hits(heatmap(2, 0), box).tolist() == [False]  # x and y are not mixed up
    assert hits(heatmap(0, 1), box).tolist() == [False]
    assert hits(heatmap(1, 2), box).tolist() == [False]


def test_a_patch_that_only_touches_the_box_is_a_miss():
    assert hits(heatmap(0, 0), torch.tensor([[0.13, 0.0, 0.5, 0.5]])).tolist() == [False]


def test_a_heatmap_that_cannot_decide_points_nowhere():
    box = torch.tensor([[0.0, 0.0, 0.5, 0.5]])
    assert hits(torch.ones(1, 4, 4), box).tolist() == [False]
    assert hits(torch.full((1, 4, 4), float("nan")), box).tolist() == [False]
    twins = heatmap(0, 0) + heatmap(1, 1)
    assert hits(twins, box).tolist() == [True]


def test_the_share_of_cells_inside_is_what_random_pointing_scores():
    torch.manual_seed(0)
    corner = torch.rand(300, 2) * 0.6
    boxes = torch.cat([corner, corner + 0.1 + 0.3 * torch.rand(300, 2)], dim=1)
    every = [hits(heatmap(r, c, 5, 7).expand(300, -1, -1), boxes) for r in range(5) for c in range(7)]
    assert abs(torch.stack(every).double().mean().item() - cells_in_boxes(boxes, (5, 7)).double().mean().item()) < 1e-9


def test_cells_follow_a_grid_that_is_not_square():
    inside = cells_in_boxes(torch.tensor([[0.0, 0.0, 0.5, 1.0]]), (2, 4))
    assert inside[0].tolist() == [[True, True, False, False]] * 2
