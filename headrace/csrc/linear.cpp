// Linear and logits as instructions: how a step's work is cut into pieces.
#include <algorithm>

#include "linear_kernels.h"

namespace hr {
namespace HR_LEVEL {
namespace {

// Rough speed of one thread, to size pieces: bytes and multiply-adds a nanosecond.
constexpr double kBytes = 12;
#if defined(HR_LEVEL_PORTABLE)
constexpr double kProducts = 4;
#else
constexpr double kProducts = 40;
#endif
// Aimed at and least length of a piece, in nanoseconds.
constexpr double kPiece = 10000, kShortest = 1000;
constexpr int32_t kPiecesAThread = 4;
// Most rows of a piece: enough to make opening a panel cheap.
constexpr int32_t kMostRows = 128;

// How one segment's work is cut: `chunks` of rows times `cuts` of panels.
struct Cut {
  int32_t rows, chunks;
  int32_t panels, cuts;
};

class Linear final : public Instruction {
 public:
  explicit Linear(const LinearArgs &args) : a_(args) {
    op = a_.logits ? "logits" : "linear";
    path = std::string(HR_LEVEL_NAME) + " " + a_.weight->layouts();
  }

  int32_t pieces(const Step &step) const override {
    int32_t rows = this->rows(step), total = 0;
    if (rows == 0) return 0;
    for (const Segment &segment : a_.weight->segments()) {
      Cut cut = this->cut(segment, rows);
      total += cut.chunks * cut.cuts;
    }
    return total;
  }

  void run(const Step &step, int32_t piece, Scratch &scratch) const override {
    int32_t rows = this->rows(step);
    for (const Segment &segment : a_.weight->segments()) {
      Cut cut = this->cut(segment, rows);
      if (piece >= cut.chunks * cut.cuts) {
        piece -= cut.chunks * cut.cuts;
        continue;
      }
      Tile tile;
      tile.args = &a_;
      tile.segment = &segment;
      tile.gather = a_.logits ? step.batch->logits_row : nullptr;
      tile.first = piece / cut.cuts * cut.rows;
      tile.rows = std::min(cut.rows, rows - tile.first);
      tile.panel = piece % cut.cuts * cut.panels;
      tile.panels = std::min(cut.panels, segment.panels - tile.panel);
      if (segment.scheme.quantized()) {
        run_quantized(tile, scratch.data);
      } else {
        run_float(tile);
      }
      if (a_.softcap != 0) cap(tile);
      return;
    }
  }

  size_t scratch_bytes() const override {
    return a_.weight->quantized() ? opened_bytes(a_.weight->groups()) : 0;
  }

  double bytes(const Step &step) const override {
    double rows = this->rows(step);
    double item = a_.weight->quantized() ? 1.25 : 4;
    return rows == 0 ? 0
                     : static_cast<double>(a_.weight->bytes()) +
                           rows * (item * a_.weight->depth() + 4.0 * a_.weight->columns());
  }
  double flops(const Step &step) const override {
    return 2.0 * rows(step) * a_.weight->depth() * a_.weight->columns();
  }

 private:
  int32_t rows(const Step &step) const { return a_.logits ? step.logits : step.tokens; }

  Cut cut(const Segment &segment, int32_t rows) const {
    Cut cut;
    cut.chunks = (rows + kMostRows - 1) / kMostRows;
    cut.rows = ((rows + cut.chunks - 1) / cut.chunks + 3) / 4 * 4;
    cut.chunks = (rows + cut.rows - 1) / cut.rows;
    double products = static_cast<double>(a_.weight->depth()) * kColumns * cut.rows;
    double panel = static_cast<double>(segment.panel_bytes) / kBytes + products / kProducts;
    double share = panel * segment.panels * cut.chunks / (a_.threads * kPiecesAThread);
    double aim = std::max(kShortest, std::min(kPiece, share));
    cut.panels = std::max(1, std::min(segment.panels, static_cast<int32_t>(aim / panel)));
    cut.cuts = (segment.panels + cut.panels - 1) / cut.panels;
    return cut;
  }

  void cap(const Tile &tile) const {
    int32_t column = tile.segment->first + tile.panel * kColumns;
    int32_t end = std::min(column + tile.panels * kColumns, tile.segment->first + tile.segment->columns);
    for (int32_t row = tile.first; row < tile.first + tile.rows; ++row)
      softcap(a_.out + static_cast<size_t>(row) * static_cast<size_t>(a_.weight->columns()) + column,
              end - column, a_.softcap);
  }

  LinearArgs a_;
};

}  // namespace

std::vector<std::unique_ptr<Instruction>> make_linear(const LinearArgs &args) {
  std::vector<std::unique_ptr<Instruction>> made;
  if (args.weight->quantized()) made.push_back(make_quantize(args));
  made.push_back(std::unique_ptr<Instruction>(new Linear(args)));
  return made;
}

}  // namespace HR_LEVEL
}  // namespace hr
