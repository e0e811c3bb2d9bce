-- For `wrk -tN -cN`: one connection for each thread, so that an answer meets the picture it was asked about.
-- LOAD_FOLDER holds N.request (bytes as they are sent) and N.class for N from 0; LOAD_PATTERN finds the class in an
-- answer. Prints one line of JSON at the end.

local folder, pattern = os.getenv("LOAD_FOLDER"), os.getenv("LOAD_PATTERN")
local threads = {}

local function read(name)
   local file = io.open(folder .. "/" .. name, "rb")
   if not file then return nil end
   local content = file:read("*a")
   file:close()
   return content
end

function setup(thread)
   thread:set("number", #threads)
   threads[#threads + 1] = thread
end

function init()
   requests, classes = {}, {}
   local content = read("0.request")
   while content do
      requests[#requests + 1] = content
      classes[#classes + 1] = read((#requests - 1) .. ".class")
      content = read(#requests .. ".request")
   end
   asked = number % #requests + 1
   right, wrong, refused, example = 0, 0, 0, ""
end

function request()
   asked = asked % #requests + 1
   return requests[asked]
end

function response(status, _, body)
   if status ~= 200 then
      refused = refused + 1
   elseif body:match(pattern) == classes[asked] then
      right = right + 1
      return
   else
      wrong = wrong + 1
   end
   if example == "" then example = (status .. " " .. body:sub(1, 150)):gsub('[%c"\\]', " ") end
end

function done(summary, latency)
   local sums, first = { right = 0, wrong = 0, refused = 0 }, ""
   for _, thread in ipairs(threads) do
      for name in pairs(sums) do sums[name] = sums[name] + thread:get(name) end
      if first == "" then first = thread:get("example") end
   end
   local lost = summary.errors
   io.write(string.format(
      '\n{"seconds": %.4f, "right": %d, "wrong": %d, "refused": %d, "lost": %d, "p50": %.4f, "p99": %.4f, "example": "%s"}\n',
      summary.duration / 1e6, sums.right, sums.wrong, sums.refused,
      lost.connect + lost.read + lost.write + lost.timeout,
      latency:percentile(50) / 1e3, latency:percentile(99) / 1e3, first))
end
