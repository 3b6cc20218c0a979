// kv_join: joins the parts that kv_attend left of a softmax into its result.
//
// best, total (Hkv, S, M) and sums (Hkv, S, M, D) float: of each of S parts of a row the largest score, the sum of weights against it, and
// the values by these weights. A part of which a query saw nothing has the total 0. Each query sees something in at least one part.
// out (Hkv, M, D) in T.
// Threads: grid (D, M, Hkv), threadgroup (D, 1, 1).
//// body
const int S = best_shape[1], M = best_shape[2];
const int d = thread_position_in_grid.x, m = thread_position_in_grid.y, head = thread_position_in_grid.z;

float most = best[ulong(head) * S * M + m];
for (int s = 1; s < S; ++s) {
  most = max(most, best[(ulong(head) * S + s) * M + m]);
}
float all = 0.0f, sum = 0.0f;
for (int s = 0; s < S; ++s) {
  const ulong at = (ulong(head) * S + s) * M + m;
  const float share = precise::exp(best[at] - most);  // 0 of a part of which nothing was seen
  all = fma(share, total[at], all);
  sum = fma(share, sums[at * D + d], sum);
}
out[(ulong(head) * M + m) * D + d] = static_cast<T>(sum / all);
